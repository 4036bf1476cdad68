"""Greedy references by transformers' own `generate`."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.aids.ids_equal import Reference
from tests.aids.tiny import one_thread


def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> Reference:
    """Greedy ids after `prompt`; the model loses its end ids and sampling defaults."""
    model.generation_config = GenerationConfig()
    wanted = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, output_logits=True, return_dict_in_generate=True
    )
    logits = torch.cat(model.generate(torch.tensor([prompt]), generation_config=wanted).logits)
    best = logits.topk(2)  # [num_tokens, 2]
    gaps = best.values[:, 0] - best.values[:, 1]
    return Reference(
        ids=best.indices[:, 0].tolist(),
        runner_ups=best.indices[:, 1].tolist(),
        gaps=[round(gap, 6) for gap in gaps.tolist()],
    )


def greedy_ids(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Those of `greedy_reference`, computed by one thread: a tiny model gains nothing from more."""
    with one_thread():
        return greedy_reference(model, prompt, num_tokens).ids


def session_references(model: PreTrainedModel, turns: list[list[int]], num_tokens: int) -> list[Reference]:
    """The answer to each turn of a session, the whole history recomputed every time."""
    history: list[int] = []
    references = []
    for turn in turns:
        reference = greedy_reference(model, history + turn, num_tokens)
        history += turn + reference.ids
        references.append(reference)
    return references
