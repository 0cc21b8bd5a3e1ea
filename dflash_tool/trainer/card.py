"""The model card of an export: what it is, how to serve it, what it was trained on, how good it was measured to be."""

from pathlib import Path
from typing import Any

from dflash_tool.drafter.config import DrafterConfig


def model_card(record: dict[str, Any], settings: DrafterConfig, dtype: str, parameters: int) -> str:
    """Markdown with Hugging Face's header.

    record: the document of `training.json`. dtype: of the weights in the file. parameters: of the drafter.
    """
    target = record["store"].get("target", {})
    name = target.get("name", "its target")
    shown = Path(name).name or name
    header = ["---", "tags:", "- speculative-decoding", "- dflash"]
    if name.count("/") == 1 and not name.startswith((".", "/")) and not Path(name).exists():  # a name on the hub
        header.append(f"base_model: {name}")
    layers = ", ".join(map(str, settings.target_layer_ids))
    return "\n".join(
        [
            *header,
            "---",
            f"# DFlash drafter for {shown}",
            "",
            f"Drafts {settings.block_size - 1} tokens in one forward, for speculative decoding with {shown}: greedy "
            "output stays that of the target, token for token.",
            "",
            "| | |",
            "|---|---|",
            f"| drafter | {settings.num_layers} layers, hidden size {settings.hidden_size}, {parameters:,} parameters "
            f"in {dtype}; embedding and LM head are the target's |",
            f"| block | {settings.block_size} slots, mask token {settings.mask_token_id} |",
            f"| sees | the output of target layers {layers} (of {settings.num_target_layers}, counted from 0) |",
            *_data(record["store"]),
            *_training(record),
            "",
            "## Measured",
            "",
            *_measured(record),
            "",
            "## Use",
            "",
            *_use(settings.block_size - 1),
        ]
    )


def _data(store: dict[str, Any]) -> list[str]:
    if "target" not in store:
        return ["| data | unknown: the store was not at hand when this was exported |"]
    files = ", ".join(Path(file["path"]).name for file in store["data"])
    return [
        f"| target | {store['target']['model_type']}, config {store['target']['config_fingerprint']}, weights "
        f"{store['target']['weights_fingerprint']} (XXH3-128) |",
        f"| data | {files}: {store['samples']:,} samples, {store['tokens']:,} tokens, {store['supervised_tokens']:,} "
        f"of them answers; up to {store['max_length']:,} tokens each |",
    ]


def _training(record: dict[str, Any]) -> list[str]:
    config = record["config"]
    return [
        f"| training | {record['step']:,} of {record['total_steps']:,} steps of {config['batch_samples']} samples, "
        f"up to {config['anchors']} blocks a sample, AdamW {config['lr']:g} |",
        "| made with | " + ", ".join(f"{name} {version}" for name, version in record["versions"].items()) + " |",
    ]


def _measured(record: dict[str, Any]) -> list[str]:
    row = record["validation"]
    if row is None:
        return ["Nothing was held out at this step: measure it with `dflash eval`."]
    anchors = sum(bucket["anchors"] for bucket in row["by_bucket"].values())
    slots = ", ".join(f"{100 * value:.0f}" for value in row["accuracy_by_slot"])
    return [
        f"On held-out answers ({anchors:,} anchors), after {record['step']:,} steps:",
        "",
        f"- walk tau **{row['walk_tau']:.2f}**: tokens that a target forward yields, bonus token included",
        f"- anchor tau {row['anchor_tau']:.2f}: the same as a mean over every position",
        f"- right in slot 1, 2, ...: {slots} %",
        "",
        "How much faster that is depends on the machine: `dflash eval --drafter DIR --target ... --data ...` tells.",
    ]


def _use(drafts: int) -> list[str]:
    return [
        f'vLLM: `speculative_config={{"method": "dflash", "model": DIR, "num_speculative_tokens": {drafts}}}`',
        "",
        "SGLang: `--speculative-algorithm DFLASH --speculative-draft-model-path DIR`",
        "",
        "transformers:",
        "",
        "```python",
        "import dflash_tool",
        "drafter = dflash_tool.load_drafter(DIR)",
        'target.generate(**inputs, assistant_model=drafter, speculation_type="dflash")',
        "```",
        "",
    ]
