"""Does the drafter speed the target up? Measured from a store alone, and in real generation.

1. `held_out.choose_samples`    drafter folder, store -> the samples it wasn't trained on, and how that is known
2. `prompts.read_prompts`       data files -> prompts that it wasn't trained on
3. `generation.Generation`      one target: plain, with transformers' DFlash, with our own decode; forwards counted
4. `answers`                    an answer -> walk tau under the drafter, distinct 4-grams; where two answers part
5. `measure.measure`            prompts -> `Measured`: taus, tokens/s, losslessness, what does not add up
"""
