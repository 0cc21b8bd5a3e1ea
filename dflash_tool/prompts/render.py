"""Conversations -> texts, as a server would send them, and the spans of characters to learn.

Turn i (an assistant message) is looked at as a server sees it: the prompt P_i, rendered from the messages
before it with the generation prompt, and the text R_i, rendered up to and including it. P_i must be the
beginning of R_i (else the server's model saw another prompt). The turn's span is what follows P_i: all the
characters that the template puts between `{% generation %}` markers, if it has these, otherwise up to and
including the end-of-turn token.

If every R_i is the beginning of the whole conversation's render, the conversation is one sample. Otherwise
(Qwen3's own template removes the thinking of earlier turns, so what the model said isn't what it sees
later) every turn is a sample R_i of its own, with that turn supervised.

A turn's tool calls must be in R_i, each of them: one that can be taken away without changing R_i was left out by
the template, and what is left of the answer (often nothing) isn't what the model said. Such a row is skipped.

Cost: two renders a turn and one a tool call, so quadratic in the turns of a conversation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from dflash_tool.errors import TargetError
from dflash_tool.prompts.messages import Message
from dflash_tool.prompts.reasons import Reason, Skipped, short
from dflash_tool.prompts.rows import ChatRow, TextRow
from dflash_tool.prompts.tokenise import Span, half_character
from dflash_tool.prompts.tokenizer import check_template_args, first_line

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "abracadabra"
# What a template may raise on a conversation that it doesn't take: its own exceptions, and Python's.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text to tokenise, its supervised spans of characters [start, end), its turns left unsupervised.

    `raw`: the row of raw text that this is, if it is one; no template has put the tokens at its ends.
    """

    source: str
    text: str
    spans: tuple[Span, ...]
    unsupervised: tuple[Skipped, ...] = ()
    raw: TextRow | None = None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """What a conversation gives: one part, or one for each assistant turn if it was split."""

    parts: tuple[RenderedText | Skipped, ...]
    split: bool = False


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str = ""  # R_i; empty if the template refused it
    marks: tuple[Span, ...] = ()  # what is generated, in R_i, earlier turns included
    prompt: int = 0  # length of P_i
    fault: Skipped | None = None  # why this turn can't be supervised


class _Refused(Exception):  # noqa: N818 - never leaves this file
    pass


class ChatTemplate:
    """A tokenizer's chat template with its arguments.

    Raises `TargetError` if the tokenizer has none or it isn't valid Jinja, `ConfigError` for the arguments.
    """

    def __init__(
        self,
        tokenizer: Any,
        args: Mapping[str, Any] | None = None,
        turns: Literal["each", "last"] = "each",
    ) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

        self._render_jinja = render_jinja_template
        self._tokenizer = tokenizer
        self._turns = turns
        self._templates: dict[bool, tuple[str, bool]] = {}
        check_template_args(args or {})
        self._args = {**tokenizer.special_tokens_map, **(args or {})}
        self._special = _special_tokens(tokenizer)
        if not tokenizer.chat_template:
            raise TargetError(
                "the data hold conversations, but the target's tokenizer has no chat template: give one with "
                "--chat-template FILE (the template that the target will be served with)"
            )
        self._as_parts, self._closing = False, ""
        self._probe()

    def render(self, row: ChatRow) -> RenderedChat:
        """Render one conversation. What comes after its last assistant turn is cut."""
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        if not answers:
            return RenderedChat((Skipped(row.source, Reason.NO_ANSWER),))
        turns = [self._turn(row, index) for index in answers]
        for index, turn in zip(answers, turns, strict=True):
            if lost := self._lost_call(row, index, turn.text):
                return RenderedChat((lost,))
        whole = turns[-1]
        if not whole.text and whole.fault is not None:
            return RenderedChat((whole.fault,))
        if all(turn.text and whole.text.startswith(self._stem(turn.text)) for turn in turns[:-1]):
            return RenderedChat((self._together(row.source, turns),))
        if self._turns == "last":
            turns = turns[-1:]
        return RenderedChat(tuple(_alone(row.source, turn) for turn in turns), split=True)

    def _turn(self, row: ChatRow, index: int) -> _Turn:
        where = f"message {index + 1}"
        try:
            text, marks = self._render(row.messages[: index + 1], row.tools)
        except _Refused as refused:
            return _Turn(fault=Skipped(row.source, Reason.TEMPLATE_REFUSED, f"{where}: {refused}"))
        if (half := half_character(text)) is not None:
            detail = f"{where} or before has {half!r}, half a character"
            return _Turn(fault=Skipped(row.source, Reason.NOT_UNICODE, detail))
        try:
            prompt, _ = self._render(row.messages[:index], row.tools, add_generation_prompt=True)
        except _Refused as refused:
            if marks and index == 0:  # markers tell what is generated even where there is nothing before it
                return _Turn(text, marks)
            detail = f"the prompt of {where}: {refused}"
            return _Turn(text, marks, fault=Skipped(row.source, Reason.TEMPLATE_REFUSED, detail))
        if not text.startswith(prompt):
            detail = f"{where}: {_difference(prompt, text)}"
            return _Turn(text, marks, fault=Skipped(row.source, Reason.PROMPT_DIFFERS, detail))
        if not self._template(row.tools)[1]:
            marks = ((len(prompt), self._end_of_turn(text, len(prompt))),)
        return _Turn(text, marks, len(prompt))

    def _lost_call(self, row: ChatRow, index: int, text: str) -> Skipped | None:
        """The first tool call of a turn that isn't in R_i, its `text` (empty if the template refused it)."""
        calls = row.messages[index].get("tool_calls")
        calls = calls if isinstance(calls, list) else [calls] if calls else []
        for place, call in enumerate(calls if text else []):
            without = {**row.messages[index], "tool_calls": calls[:place] + calls[place + 1 :]}
            try:
                same = self._render([*row.messages[:index], without], row.tools)[0] == text
            except _Refused:
                continue  # it looks at the calls
            if same:
                detail = (
                    f"message {index + 1} calls {_called(call)}; give a template that renders calls, --chat-template"
                )
                return Skipped(row.source, Reason.CALL_LEFT_OUT, detail)
        return None

    def _together(self, source: str, turns: Sequence[_Turn]) -> RenderedText | Skipped:
        """All turns in one sample: the last turn's text, every turn's span."""
        whole = turns[-1].text
        spans: list[Span] = []
        for turn in turns:
            stop = len(whole if turn is turns[-1] else self._stem(turn.text))
            spans += [] if turn.fault else _clip(turn.marks, turn.prompt, stop)
        faults = tuple(turn.fault for turn in turns if turn.fault is not None)
        return faults[0] if len(faults) == len(turns) else RenderedText(source, whole, tuple(spans), faults)

    def _render(
        self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> tuple[str, tuple[Span, ...]]:
        """Return the text and the spans between generation markers, if the template has these."""
        template, has_markers = self._template(tools)
        marked = has_markers and not add_generation_prompt
        try:
            rendered, marks = self._render_jinja(
                conversations=[list(map(_in_parts, messages)) if self._as_parts else messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=add_generation_prompt,
                **self._args,
            )
        except jinja2.TemplateSyntaxError as error:
            raise TargetError(f"the chat template isn't valid Jinja: line {error.lineno}: {error}") from error
        except _REFUSALS as error:
            raise _Refused(first_line(error)) from error
        return rendered[0], tuple(marks[0]) if marked else ()

    def _template(self, tools: list[Any] | None) -> tuple[str, bool]:
        """Template for conversations with or without tools, and whether it has generation markers."""
        key = tools is not None
        if key not in self._templates:
            try:
                template: str = self._tokenizer.get_chat_template(None, tools)
            except ValueError as error:  # several templates, none the default
                raise TargetError(f"{first_line(error)} Give one with --chat-template FILE") from error
            self._templates[key] = template, _MARKER.search(template) is not None
        return self._templates[key]

    def _end_of_turn(self, text: str, start: int) -> int:
        """Behind the last special token of the turn, if only blanks follow it; otherwise the turn's end."""
        for end in (len(self._stem(text)), len(text)):
            tokens = list(self._special.finditer(text, start, end))
            if tokens and not text[tokens[-1].end() : end].strip():
                return tokens[-1].end()
        return len(text)

    def _stem(self, text: str) -> str:
        return text.removesuffix(self._closing)

    def _probe(self) -> None:
        """Learn two habits of the template from a conversation that goes on and one that doesn't.

        Whether it wants content as a list of parts (those of multimodal models leave plain strings out),
        and its closing: what it adds behind the last turn and nowhere else (Phi-3: the eos token).
        """
        chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": _PROBE}]
        left_out = False
        for self._as_parts in (False, True):
            try:
                ended, _ = self._render(chat, None)
                goes_on, _ = self._render([*chat, {"role": "user", "content": "two"}], None)
            except _Refused:
                continue
            left_out = _PROBE not in ended
            if not left_out:
                self._closing = self._behind(ended, goes_on)
                return
        if left_out:
            raise TargetError(
                "the chat template leaves out what the assistant says; give another with --chat-template FILE"
            )
        self._as_parts = False

    def _behind(self, ended: str, goes_on: str) -> str:
        same = _common(ended, goes_on)
        for special in self._special.finditer(ended):
            if special.start() < same < special.end():  # two different tokens that begin alike
                same = special.start()
        return ended[same:] if same >= ended.rfind(_PROBE) + len(_PROBE) else ""


def _alone(source: str, turn: _Turn) -> RenderedText | Skipped:
    """Only this turn supervised, in a sample of its own."""
    if turn.fault is not None:
        return turn.fault
    return RenderedText(source, turn.text, tuple(_clip(turn.marks, turn.prompt, len(turn.text))))


def _called(call: Any) -> str:
    """What a tool call calls, for people."""
    function = call.get("function", call) if isinstance(call, dict) else call
    return short(function.get("name") if isinstance(function, dict) else function)


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return message if content is None else {**message, "content": [{"type": "text", "text": content}]}


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    texts = {text for text in (*tokenizer.all_special_tokens, *added) if text.strip()}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _clip(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    clipped = ((max(first, start), min(last, end)) for first, last in spans)
    return [(first, last) for first, last in clipped if first < last]


def _common(one: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _difference(prompt: str, text: str) -> str:
    """Where the server's prompt and the rendered turn part, for people."""
    there = slice(_common(prompt, text), _common(prompt, text) + 30)
    return f"the server's prompt goes on {prompt[there]!r}, the conversation {text[there]!r}"
