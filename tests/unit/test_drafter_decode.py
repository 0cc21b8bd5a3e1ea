"""Our decode loop: transformers' drafts at T = 0; the target's own distribution at T > 0."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.generation import DFlashTokenCandidateGenerator

from dflash_tool.drafter import decode as decode_module
from dflash_tool.drafter.decode import decode, distribution, residual

from .drafter_kit import LAYERS, drafter_for, generate, head_of, random_target, train


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A random target, and a drafter that learned its greedy answers a little."""
    target = random_target("qwen3", tied=False, seed=1)
    drafter, prompts = drafter_for(target, 5), torch.randint(0, 60, (12, 4), generator=torch.Generator().manual_seed(3))
    answers = torch.cat([generate(target, prompt, tokens=30) for prompt in prompts.split(1)])
    with torch.no_grad():
        layers = target(answers, output_hidden_states=True).hidden_states
    states = torch.cat([layers[layer + 1] for layer in LAYERS], -1)
    tokens = list(answers.numpy())
    masks = [torch.arange(34).ge(4).numpy()] * 12
    train(drafter, head_of(target), 25, lambda _: (states, tokens, masks), lr=1e-2)
    return target, drafter.eval()


@pytest.mark.parametrize("end", [(), (17, 44)])
def test_drafts_are_those_of_transformers(
    pair: tuple[Any, Any], end: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair
    theirs: list[list[int]] = []
    candidates = DFlashTokenCandidateGenerator.get_candidates

    def note(self: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        found = candidates(self, input_ids, *args, **options)
        if found[1] is not None:
            theirs.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", note)
    accepted = 0
    for prompt in torch.randint(0, 60, (12, 4), generator=torch.Generator().manual_seed(3)).split(1):
        theirs.clear()
        options = {"eos_token_id": list(end)} if end else {}
        whole = generate(target, prompt, tokens=30, assistant_model=drafter, speculation_type="dflash", **options)
        ours = decode(target, drafter, prompt[0], max_new_tokens=30, end=end)
        assert ours.tokens == whole[0, 4:].tolist()
        assert ours.drafts[: len(theirs)] == theirs
        assert len(ours.drafts) - len(theirs) <= 1  # with one token to go transformers no longer drafts
        assert ours.forwards == len(ours.drafts) + 1
        uncut = sum(ours.accepted) + len(ours.accepted) + 1
        assert 0 <= uncut - len(ours.tokens) <= ours.accepted[-1]  # what the end of the answer cut off
        accepted += len(ours.tokens) - ours.forwards
    assert accepted > 12


class Chain(nn.Module):
    """A target whose next token depends on the newest one alone: what it must yield is known in closed form."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.embedding, self.head = nn.Embedding(vocabulary, 4).double(), nn.Linear(4, vocabulary, bias=False).double()
        self.config = AutoConfig.for_model("qwen3", num_hidden_layers=1)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def _supports_logits_to_keep(self) -> bool:
        return False

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.table[input_ids], hidden_states=[self.embedding(input_ids)] * 2)


class Guess(nn.Module):
    """A drafter with the same unsure guesses for every block."""

    settings = SimpleNamespace(block_size=4, mask_token_id=0, target_layer_ids=(0,))

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def forward(self, *_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.hidden)


def excess(temperature: float) -> tuple[float, float]:
    """Of 20,000 draws' transitions over the target's: chi-square above its mean, in deviations; and tau."""
    torch.manual_seed(0)
    target, drafter, seen = Chain(6), Guess(), torch.zeros(6, 6, dtype=torch.float64)
    generator, draws, forwards = torch.Generator().manual_seed(1), 0, 0
    for round_ in range(100):
        start = torch.tensor([round_ % 6])
        made = decode(target, drafter, start, max_new_tokens=200, temperature=temperature, generator=generator)  # type: ignore[arg-type]
        chain = torch.tensor([*start.tolist(), *made.tokens])
        seen.index_put_((chain[:-1], chain[1:]), torch.ones(200, dtype=torch.float64), accumulate=True)
        draws += len(made.tokens)
        forwards += made.forwards
    assert draws == 20_000
    expected = seen.sum(1, keepdim=True) * (target.table / temperature).softmax(-1)
    freedom = 6 * 5
    chi_square = float(((seen - expected).square() / expected).sum())
    return (chi_square - freedom) / (2 * freedom) ** 0.5, draws / forwards


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_keeps_the_target_s_distribution(temperature: float) -> None:
    off, tau = excess(temperature)
    assert abs(off) < 3
    assert 1.2 < tau < 3.5  # drafts were accepted, and drafts were refused


@pytest.mark.parametrize("wrong", ["no residual", "always accepted"])
def test_a_wrong_rule_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 draws do tell: with either half of the rule broken the distribution is far off."""
    if wrong == "no residual":
        monkeypatch.setattr(decode_module, "residual", lambda p, q: p)
    else:
        monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.zeros(*shape, dtype=torch.float64))
    off, _ = excess(1.0)
    assert off > 20


def test_distribution_and_residual_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert distribution(logits, 0.0).tolist() == [[0, 1, 0]]
    torch.testing.assert_close(distribution(logits, 2.0), torch.tensor([[0.0, 1.0, 0.5]]).softmax(-1))
    assert distribution(logits.bfloat16(), 1.0).dtype == torch.float32
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    assert residual(p, q).tolist() == [1, 0, 0]
    assert residual(p, p).tolist() == p.tolist()
