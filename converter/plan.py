"""Everything a conversion will do, decided and checked before a byte is written."""

import re
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import msgspec
import torch

from limpet.backend.checkpoint import DType, ModelConfig, TokenizerConfig
from limpet.backend.config import EngineConfig
from limpet.converter.aliases import Alias, parse_aliases, require_free_alias
from limpet.converter.built_in_templates import with_template
from limpet.converter.chat_template import is_append_only
from limpet.converter.errors import ConversionError
from limpet.converter.links import LinkedSteps, split_linkable
from limpet.converter.open_source import open_source
from limpet.converter.rules import Layout, Step, plan_steps
from limpet.converter.source import Source
from limpet.converter.weights import plan_shards, torch_dtype, weight_bytes
from limpet.converter.workspace import checked_name, name_from, repository_of, require_free


@dataclass(frozen=True)
class Options:
    """What the user asks for; None leaves the choice to the source."""

    source: Path
    workspace: Path
    name: str | None = None
    dtype: DType | None = None
    chat_template: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    force: bool = False
    link: bool = False
    dry_run: bool = False
    aliases: tuple[str, ...] = ()  # KIND or KIND=NAME


@dataclass(frozen=True)
class Plan:
    """A model to write."""

    source: Source
    config: ModelConfig
    tokenizer_config: TokenizerConfig
    engine: EngineConfig
    linked: LinkedSteps
    shards: list[list[Step]]
    workspace: Path
    name: str
    warnings: tuple[str, ...]
    aliases: tuple[Alias, ...] = ()

    @property
    def target(self) -> Path:
        return repository_of(self.workspace) / self.name

    @property
    def num_parameters(self) -> int:
        return sum(prod(step.shape) for steps in (*self.shards, *self.linked.values()) for step in steps)

    @property
    def written_bytes(self) -> int:
        """Of the weights' new files."""
        return weight_bytes(self.shards, torch_dtype(self.config))

    @property
    def total_bytes(self) -> int:
        """Of all weights, linked ones included."""
        return self.num_parameters * torch_dtype(self.config).itemsize

    @property
    def session_len(self) -> int:
        return self.engine.session_len or self.config.max_position_embeddings


def make_plan(options: Options) -> Plan:
    """Check the source against the rules and say what will be written.

    Raises ConversionError for everything that is wrong with the source, the target or the options.
    """
    source = _settle_template(_settle_tied_head(open_source(options.source)), options.chat_template)
    end_ids, end_warnings = _settle_end_ids(source)
    config = msgspec.structs.replace(
        source.config, dtype=options.dtype or source.config.dtype, eos_token_ids=tuple(end_ids)
    )
    _require_heads(config)
    steps = plan_steps(source.layout, config, source.store.tensors)
    _require_vocabulary(source, config)
    linked, written = split_linkable(steps, source.store, config) if options.link else ({}, steps)
    engine, window_warnings = _settle_session_len(options.engine, config)
    tokenizer_config, template_warnings = _try_template(source)
    name = name_from(source.name) if options.name is None else checked_name(options.name)
    plan = Plan(
        source=source,
        config=config,
        tokenizer_config=tokenizer_config,
        engine=engine,
        linked=linked,
        shards=plan_shards(written, torch_dtype(config)),
        workspace=options.workspace,
        name=name,
        warnings=(*source.warnings, *end_warnings, *window_warnings, *template_warnings),
        aliases=parse_aliases(options.aliases, name),
    )
    require_free(plan.target, options.force or options.dry_run)
    for alias in plan.aliases:
        require_free_alias(plan.target.parent, alias, name)
    return plan


def _settle_end_ids(source: Source) -> tuple[list[int], list[str]]:
    """Those that the vocabulary has, and a warning about the others."""
    size, named = source.config.vocab_size, source.tokenizer.eos_token_ids
    kept = [id for id in named if 0 <= id < size]
    others = ", ".join(str(id) for id in named if id not in kept)
    return kept, [f"End ids past the vocabulary of {size:,} were left out: {others}."] if others else []


def _settle_tied_head(source: Source) -> Source:
    """Decide for a tied checkpoint that also ships a head: the same one is left out, another one is kept.

    transformers decides so too: a head that differs from the embedding is no tied one, whatever the configuration says.
    """
    names = {rule.target: rule.parts[0].source for rule in source.layout.rules}
    head, embedding = names["lm_head.weight"], names["embed_tokens.weight"]
    tensors = source.store.tensors
    if not source.config.tie_word_embeddings or head not in tensors or embedding not in tensors:
        return source
    if torch.equal(source.store.read(head), source.store.read(embedding)):
        layout = Layout(source.layout.rules, (*source.layout.ignored, re.escape(head)))
        return replace(source, layout=layout)
    warning = f"The configuration ties the output head to the embedding, but {head} differs from it: kept as its own."
    config = msgspec.structs.replace(source.config, tie_word_embeddings=False)
    return replace(source, config=config, warnings=(*source.warnings, warning))


def _settle_template(source: Source, wanted: str | None) -> Source:
    if wanted is None:
        return source
    tokenizer, warnings = with_template(source.tokenizer, wanted)
    return replace(source, tokenizer=tokenizer, warnings=(*source.warnings, *warnings))


def _settle_session_len(engine: EngineConfig, config: ModelConfig) -> tuple[EngineConfig, list[str]]:
    """Keep a context within the sliding window, past which full attention would be silently wrong."""
    limit, window = config.max_position_embeddings, config.sliding_window
    reason = "the model's context"
    if window is not None and window < limit:
        limit, reason = window, "the model's sliding window, past which attention is not implemented"
    if engine.session_len is not None and engine.session_len > limit:
        raise ConversionError(f"--session-len {engine.session_len} is more than {limit}, {reason}.")
    if limit == config.max_position_embeddings or engine.session_len is not None:
        return engine, []
    warning = f"session_len is set to {limit}, {reason}; the model's context is {config.max_position_embeddings}."
    return msgspec.structs.replace(engine, session_len=limit), [warning]


def _require_heads(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConversionError(
            f"The model has {config.num_heads} attention heads, no multiple of its {config.num_kv_heads} K/V heads."
        )
    if config.head_dim % 2:
        raise ConversionError(f"The model's head size is {config.head_dim}; rotary embedding needs an even one.")


def _require_vocabulary(source: Source, config: ModelConfig) -> None:
    highest = max(source.tokenizer.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= config.vocab_size:
        raise ConversionError(
            f"The tokenizer has ids up to {highest}, but the model's vocabulary has {config.vocab_size} entries."
        )


def _try_template(source: Source) -> tuple[TokenizerConfig, list[str]]:
    config = source.tokenizer.config
    if source.tokenizer.chat_template is None:
        return config, ["There is no chat template: text is passed to the model as it is (see --chat-template)."]
    append_only = is_append_only(source.tokenizer.chat_template, config)
    rewriting = "The chat template rewrites earlier turns: a session's next turn recomputes what changed."
    return msgspec.structs.replace(config, append_only_template=append_only), [] if append_only else [rewriting]
