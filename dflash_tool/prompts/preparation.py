"""Files of rows -> prepared samples, streamed as Arrow record batches in the order of the files.

1. `read_rows`     file   -> rows or `Skipped`
2. `ChatTemplate`  row    -> texts with supervised spans; `RawText` where there is no conversation (a row of
                   ready tokens passes by)
3. `Encoder`       chunk  -> token ids and loss masks, a few hundred texts at a time, on all cores
4. `SampleMaker`   sample -> cut or skipped by length, checked, given its id
5. `record_batch`  chunk  -> the columns of samples.arrow, without `bucket` (all lengths decide that)

In memory at once: one chunk, and a hash for each sample to number its duplicates by.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_tool.errors import DataError
from dflash_tool.prompts.paths import check_files
from dflash_tool.prompts.raw import RawText
from dflash_tool.prompts.reasons import ASKED_FOR, Skipped
from dflash_tool.prompts.render import ChatTemplate, RenderedText
from dflash_tool.prompts.rows import Row, TextRow, TokenRow, read_rows
from dflash_tool.prompts.samples import PrepareOptions, Sample, SampleMaker, record_batch
from dflash_tool.prompts.tokenise import Encoder
from dflash_tool.wording import counted

_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 4 << 20
_EXAMPLES = 3

Progress = Callable[[int, int, int], None]
Item = RenderedText | TokenRow | Skipped


@dataclass(slots=True)
class PrepareStats:
    """What came of the rows, complete once the stream has ended.

    `rows - split_rows + split_parts == samples + sum(skipped.values())`: nothing is lost unsaid. `skipped`
    counts rows, and parts of split conversations, that gave no sample, by reason; `unsupervised` assistant
    turns inside kept samples that could not be supervised. `examples` holds the first few of each reason as
    "file:line: detail".
    """

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    duplicates: int = 0
    truncated: int = 0
    longest: int = 0
    split_rows: int = 0
    split_parts: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    unsupervised: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def count_sample(self, sample: Sample) -> None:
        """One more that is kept."""
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.supervised += int(sample.loss_mask.sum())
        self.duplicates += sample.duplicate
        self.truncated += sample.truncated
        self.longest = max(self.longest, len(sample.input_ids))

    def count_skipped(self, skipped: Skipped, counts: dict[str, int] | None = None) -> None:
        """One more under its reason, in `skipped` or in `counts`."""
        counts = self.skipped if counts is None else counts
        reason = str(skipped.reason)
        counts[reason] = counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(skipped.source + (f": {skipped.detail}" if skipped.detail else ""))

    def describe_skipped(self) -> list[str]:
        """`["2 not JSON, first: a.jsonl:3: ...", ...]`, the most frequent reason first."""
        order = sorted(self.skipped.items(), key=lambda pair: (-pair[1], pair[0]))
        return [f"{count} {reason}, first: {self.examples[reason][0]}" for reason, count in order]


@dataclass(slots=True)
class _Chunk:
    """Consecutive items on their way to one record batch."""

    items: list[Item] = field(default_factory=list)
    characters: int = 0
    bytes_done: int = 0


class Preparation:
    """One pass over the data: iterate once for record batches of `PREPARED_SCHEMA`, then read `stats`.

    Making it raises `DataError` for files that can't be opened. The iteration raises `DataError` (a wrong or
    damaged file, the first bad row under `strict`, no sample at all) and `TargetError` (a conversation came and
    there is no usable chat template). `on_progress(bytes done, in all, samples)` is called after each batch.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Any,
        options: PrepareOptions,
        on_progress: Progress | None = None,
    ) -> None:
        self.stats = PrepareStats()
        self._files = list(files)
        self._sizes = check_files(self._files)
        self._tokenizer = tokenizer
        self._options = options
        self._on_progress = on_progress
        self._template: ChatTemplate | None = None  # made when the first conversation comes
        self._raw = RawText(tokenizer)
        self._maker = SampleMaker(options)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        encoder = Encoder(self._tokenizer)
        for chunk in self._chunks():
            samples = self._samples(chunk, encoder)
            if samples:
                yield record_batch(samples)
            if self._on_progress is not None:
                self._on_progress(chunk.bytes_done, sum(self._sizes), self.stats.samples)
        if not self.stats.samples:
            raise DataError(self._nothing_left())

    def _chunks(self) -> Iterator[_Chunk]:
        chunk, bytes_before = _Chunk(), 0
        for path, size in zip(self._files, self._sizes, strict=True):
            for row, bytes_done in read_rows(path):
                self.stats.rows += 1
                for item in self._items(row):
                    chunk.items.append(item)
                    chunk.characters += len(item.text) if isinstance(item, RenderedText) else 0
                chunk.bytes_done = bytes_before + bytes_done
                if len(chunk.items) >= _CHUNK_ROWS or chunk.characters >= _CHUNK_CHARACTERS:
                    yield chunk
                    chunk = _Chunk()
            bytes_before += size
        if chunk.items:
            chunk.bytes_done = bytes_before
            yield chunk

    def _items(self, row: Row | Skipped) -> Sequence[Item]:
        if isinstance(row, TokenRow | Skipped):
            return (row,)
        if isinstance(row, TextRow):
            return (self._raw.render(row),)
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._options.template_args, self._options.turns)
        chat = self._template.render(row)
        if chat.split:
            self.stats.split_rows += 1
            self.stats.split_parts += len(chat.parts)
        return chat.parts

    def _samples(self, chunk: _Chunk, encoder: Encoder) -> list[Sample]:
        texts = [item for item in chunk.items if isinstance(item, RenderedText)]
        encoded = iter(encoder.encode([item.text for item in texts], [item.spans for item in texts]))
        samples = []
        for item in chunk.items:
            match item:
                case Skipped():
                    sample: Sample | Skipped = item
                case TokenRow():
                    sample = self._maker.make(item.source, item.input_ids, item.loss_mask)
                case RenderedText(raw=None):
                    sample = self._maker.make(item.source, *next(encoded))
                case RenderedText(raw=TextRow() as row):
                    sample = self._maker.make(item.source, *self._raw.frame(row, *next(encoded)))
            if isinstance(sample, Skipped):
                self._raise_if_strict(sample)
                self.stats.count_skipped(sample)
                continue
            for turn in item.unsupervised if isinstance(item, RenderedText) else ():
                self._raise_if_strict(turn)
                self.stats.count_skipped(turn, self.stats.unsupervised)
            self.stats.count_sample(sample)
            samples.append(sample)
        return samples

    def _raise_if_strict(self, skipped: Skipped) -> None:
        if self._options.strict and skipped.reason not in ASKED_FOR:
            raise DataError(f"{skipped} (--strict stops at the first such row)")

    def _nothing_left(self) -> str:
        names = ", ".join(map(str, self._files[:3])) + (", ..." if len(self._files) > 3 else "")
        if not self.stats.rows:
            return f"{names}: nothing to do: no rows in the data"
        reasons = "; ".join(self.stats.describe_skipped())
        return f"{names}: nothing to do: none of {counted(self.stats.rows, 'row')} gives a sample: {reasons}"
