"""The plan: which samples come when, and in which batches. Pure numpy, no state, the same on every machine.

1. `choose_edges`, `assign_buckets`   lengths -> K edges with the least padding -> a bucket for every sample
2. `epoch_order`                      shuffled inside each bucket, buckets merged so that every step is fair
3. `extraction_batches`               the order in windows -> target batches under a token budget
4. `StepPlan`                         the order in steps of G samples -> microbatches under two budgets
5. `count_copies`, `number_copies`     a store's weight -> copies of its samples
6. `assign`                           a step's microbatches -> drafters, by predicted cost
"""

from dflash_tool.buckets.batches import BATCH_COST, Batch, extraction_batches, padding_share
from dflash_tool.buckets.copies import copy_ids, count_copies, number_copies
from dflash_tool.buckets.edges import assign_buckets, check_edges, choose_edges, fewest_slots
from dflash_tool.buckets.keys import hash_arrays, hash_words, sample_keys
from dflash_tool.buckets.order import epoch_order, interleave, merge_buckets
from dflash_tool.buckets.steps import BLOCK_COST, Microbatch, Step, StepPlan, assign, cut_group

__all__ = [
    "BATCH_COST",
    "BLOCK_COST",
    "Batch",
    "Microbatch",
    "Step",
    "StepPlan",
    "assign",
    "assign_buckets",
    "check_edges",
    "choose_edges",
    "copy_ids",
    "count_copies",
    "cut_group",
    "epoch_order",
    "extraction_batches",
    "fewest_slots",
    "hash_arrays",
    "hash_words",
    "interleave",
    "merge_buckets",
    "number_copies",
    "padding_share",
    "sample_keys",
]
