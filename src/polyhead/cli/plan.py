"""`polyhead plan`: estimate the cost of a head layout before training or serving it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.options import Language, MachineName, optional, page_language
from polyhead.cli.terminal import wide_console
from polyhead.errors import OptionError


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Known model (llama3.1-8b, gpt3-175b, ...), config file, model folder, or name on the hub.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, optional("JSON config, of Hugging Face or polyhead.", metavar="FILE")] = None,
    d_model: Annotated[int | None, optional("Width of the model; with --heads, instead of MODEL.", metavar="N")] = None,
    heads: Annotated[int | None, optional("Number of query heads.", metavar="N")] = None,
    kv_heads: Annotated[int | None, optional("Number of KV heads. [default: that of --heads]", metavar="N")] = None,
    head_dim: Annotated[int | None, optional("Width of a head. [default: d-model / heads]", metavar="N")] = None,
    layers: Annotated[
        int | None, optional("Layers, with --d-model or a polyhead config. [default: 1]", metavar="N")
    ] = None,
    window: Annotated[
        int | None, optional("Sliding window in tokens, with --d-model. [default: full attention]", metavar="N")
    ] = None,
    rotary: Annotated[bool, typer.Option("--rotary", help="Use rotary positions (RoPE), with --d-model.")] = False,
    causal: Annotated[
        bool | None,
        optional("Attention mask. [default: the model's; causal with --d-model]", "--causal/--bidirectional"),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences per batch.")] = 1,
    context: Annotated[
        int | None, optional("Tokens per sequence. [default: 4096, or the model's maximum if smaller]", metavar="N")
    ] = None,
    beyond: Annotated[bool, typer.Option("--beyond", help="Allow a context longer than the model's maximum.")] = False,
    dtype: Annotated[
        str | None, optional("Dtype of the layers: bfloat16, float16, float32. [default: the model's, or bfloat16]")
    ] = None,
    cache_dtype: Annotated[
        str | None,
        optional("Dtype of the KV cache, also int8 or float8_e4m3fn. [default: the model's, or that of the layers]"),
    ] = None,
    phase: Annotated[
        str | None, optional("Phases to plan: training, prefill, decode. [default: all]", metavar="PHASE,...")
    ] = None,
    machine: MachineName = None,
    tensor_parallel: Annotated[
        int | None, optional("Ranks over which the heads of each layer are distributed.", metavar="N")
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="With --tensor-parallel, in training: shards of the sequence.")
    ] = False,
    context_parallel: Annotated[
        int | None, optional("Ranks over which the tokens of each sequence are split.", metavar="N")
    ] = None,
    context_method: Annotated[str, typer.Option(metavar="METHOD", help="ring, all_gather, or auto by size.")] = "auto",
    fsdp: Annotated[
        int | None, optional("Ranks over which all parameters are sharded, each with its own batch.", metavar="N")
    ] = None,
    link_bandwidth: Annotated[
        str | None,
        optional(
            "Bandwidth of the links between ranks, for the time of their collectives: 450GB/s, or "
            "tensor=450GB/s,fsdp=50GB/s.",
            metavar="BANDWIDTH",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    output: Annotated[
        Path | None,
        optional("Write a self-contained HTML page: will it fit, how fast, which layout.", metavar="FILE.html"),
    ] = None,
    lang: Language = "en",
) -> None:
    """Estimate the cost of a model's attention: parameters, FLOPs, bytes moved, memory, KV cache, time.

    Counts are exact. Times are predicted for a machine that was measured, or from the datasheet of one;
    `polyhead plan calibrate` measures yours.

    Examples: `polyhead plan llama3.1-8b --context 8192`,
    `polyhead plan --d-model 4096 --heads 32 --kv-heads 8 --layers 32`,
    `polyhead plan --config config.json --machine nvidia-h200 --output plan.html`,
    `polyhead plan llama3.1-8b --machine nvidia-l4 --tensor-parallel 4 --link-bandwidth 64GB/s`
    """
    from polyhead.costs.options import check_sizes, parse_phases, parse_ranks
    from polyhead.costs.quantities import named_dtype, parse_dtype
    from polyhead.costs.timing.machine_files import find_machine

    _check_output(output)
    language = page_language(lang)
    sizes = {"--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim, "--window": window}
    _check_source(model, config, d_model, {**sizes, "--rotary": rotary or None})
    check_sizes(d_model=d_model, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window)
    check_sizes(layers=layers, batch=batch, context=context)
    for name in (dtype, cache_dtype):
        if name is not None:
            parse_dtype(name)
    phases = None if phase is None else parse_phases(part.strip() for part in phase.split(","))
    counts = {"tensor": tensor_parallel, "context": context_parallel, "fsdp": fsdp}
    ranks = parse_ranks(counts, sequence_parallel, context_method, link_bandwidth)
    if machine is not None:
        find_machine(machine)

    import polyhead
    from polyhead.cli.plan_table import draw
    from polyhead.costs.layouts.layout_sources import from_sizes, read_layout
    from polyhead.costs.timing.machine import Machine

    chosen = None if machine is None else Machine.load(machine)
    source = config if model is None else model
    if source is not None:
        layout = read_layout(source, layers=layers, causal=causal)
    else:
        assert d_model is not None and heads is not None  # checked above
        layout = from_sizes(
            d_model,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=1 if layers is None else layers,
            causal=causal is not False,
            window=window,
            rotary=rotary,
        )
    result = polyhead.plan(
        layout,
        context=context,
        batch=batch,
        dtype=None if dtype is None else named_dtype(dtype),
        cache_dtype=None if cache_dtype is None else named_dtype(cache_dtype),
        phases=phases,
        beyond=beyond,
        machine=chosen,
        ranks=ranks,
    )
    written = None
    if output is not None:
        from polyhead.costs.comparison import compare
        from polyhead.report.plan_page import write_plan_page

        written = write_plan_page(output, result, compare(result, chosen), language=language)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        draw(result, wide_console())
    if written is not None:
        typer.echo(str(written), err=as_json)


def _check_source(model: str | None, config: Path | None, d_model: int | None, sizes: dict[str, int | None]) -> None:
    """Raise unless the heads are defined once: by a model, a config, or sizes."""
    if model == "calibrate":
        raise OptionError(
            "`polyhead plan calibrate` takes no options of `polyhead plan`, got some before calibrate; omit them, or "
            "write ./calibrate for a model's folder of that name"
        )
    sources = [
        name for name, value in (("MODEL", model), ("--config", config), ("--d-model", d_model)) if value is not None
    ]
    if len(sources) != 1:
        raise OptionError(
            f"specify one of MODEL, --config, and --d-model with --heads; got {' and '.join(sources) or 'none'}"
        )
    given = [name for name, value in sizes.items() if value is not None]
    if d_model is None and given:
        raise OptionError(f"{sources[0]} defines its own heads, got {', '.join(given)} as well; omit them")
    if config is not None and not config.is_file():
        raise OptionError(f"--config must be an existing file, got {config}")
    if d_model is not None and sizes["--heads"] is None:
        raise OptionError(f"--d-model requires --heads, got --d-model {d_model} without it")


def _check_output(output: Path | None) -> None:
    from polyhead.observation.run_folder import check_file
    from polyhead.report.page import check_place

    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise OptionError(f"--output must be a file in an existing folder, got {output}")
    if output is not None:
        check_file(output, "--output")
        check_place(output)
