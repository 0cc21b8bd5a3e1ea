"""The DFlash drafter: config, model, attention, anchors, loss, acceptance, decoding, and the files that engines serve.

1. `config.drafter_config`: the target's config and a few options -> `DrafterConfig`
2. `anchors`: loss masks -> anchors, labels and counted slots of a microbatch's blocks (numpy alone)
3. `attention.plan_attention`: which block sees which context, once for all layers of a microbatch
4. `model.DFlashDraftModel`: hidden states and blocks -> the hidden state of every slot
5. `loss.decay_loss`, `loss.dpace_loss`: those -> (numerator, denominator) and which slots were right, through
   `head.TargetHead`
6. `acceptance`: right slots -> accepted lengths, anchor tau and walk tau
7. `files`: the folder that transformers, vLLM and SGLang load
8. `decode`: speculative decoding in one loop, greedy or by rejection sampling
9. `conformance`: a folder held against `plain`, a second implementation that shares nothing with the model
"""
