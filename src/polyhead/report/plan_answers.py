"""Answers of a plan's page in a few sentences: will it fit, how fast, which layout."""

from __future__ import annotations

from collections.abc import Iterable

from polyhead.analysis.languages import Text
from polyhead.costs import plan_wording as wording
from polyhead.costs.comparison import Comparison, LayoutPoint, MachinePoint
from polyhead.costs.phases import PhasePlan
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import count, decimal_size, dtype_name, plural, seconds, size
from polyhead.costs.timing.machine import MachineSummary
from polyhead.report import plan_words as words


def fit(plan: Plan, comparison: Comparison) -> list[Text]:
    """Return one sentence per phase: the memory that it needs, for what, and the machines that have it."""
    places = [_where(comparison.machines, index) for index in range(len(plan.phases))]
    sentences: list[Text] = []
    for index, (phase, place) in enumerate(zip(plan.phases, places, strict=True)):
        name, needs = words.doing(plan, phase), decimal_size(phase.needed)
        counted, sizes = words.counted(plan, phase), Text("", "")
        if index == 0:
            sizes = Text(
                f" at batch {plan.batch}, {plan.context:,} tokens", f"（批量 {plan.batch}，{plan.context:,} 个词元）"
            )
        lead = Text(
            f"{name.en}{sizes.en} needs {needs} for {counted.en}", f"{name.zh}{sizes.zh}需要 {needs}（{counted.zh}）"
        )
        sentences.append(_join(lead, _AGAIN if index > 0 and place == places[index - 1] else place))
    if plan.machine is not None:
        names = [words.short_name(plan, phase) for phase in plan.phases]
        batches = [Text(*[f" {fit.max_batch:,}"] * 2) for fit in plan.fits]
        machine, most = plan.machine.name, _listed(map(_join, names, batches))
        sentences.append(Text(f"Largest batch on {machine}: {most.en}.", f"{machine} 上的最大批量：{most.zh}。"))
    return sentences


_AGAIN = Text(": the same machines.", "：机器同上。")
_PLACES = {
    "fits": Text("fits into {places}", "可放入 {places}"),
    "tight": Text("tight in {places}", "在 {places} 中紧张"),
    "does not fit": Text("does not fit into {places}", "放不进 {places}"),
}


def _where(machines: tuple[MachinePoint, ...], index: int) -> Text:
    """Return the memory sizes into which the phase of an index fits, in which it is tight, and into which not."""
    groups: dict[str, dict[str, list[str]]] = {verdict: {} for verdict in _PLACES}
    for point in sorted(machines, key=lambda point: point.memory_bytes):
        sizes = groups[point.phases[index].verdict(point.memory_bytes)]
        sizes.setdefault(decimal_size(point.memory_bytes), []).append(point.machine.name)
    parts = [
        _PLACES[verdict].format(places=", ".join(f"{memory} ({', '.join(names)})" for memory, names in sizes.items()))
        for verdict, sizes in groups.items()
        if sizes
    ]
    return Text(f": {'; '.join(part.en for part in parts)}.", f"：{'；'.join(part.zh for part in parts)}。")


def speed(plan: Plan, comparison: Comparison) -> list[Text]:
    """Return the predicted times on the plan's machine, or else on the fastest and the slowest machine."""
    timed = [point for point in comparison.machines if point.curves]
    if not timed:
        dtype = dtype_name(plan.dtype)
        return [
            Text(
                f"No known machine has rates in {dtype}, so that no time is predicted; plan another dtype.",
                f"已知的机器都没有 {dtype} 的速率，因此无法预测时间；请换一种 dtype。",
            )
        ]
    if plan.machine is not None and plan.is_timed:
        machine = machine_words(plan.machine)
        times = _listed(_phase_time(plan, phase) for phase in plan.phases)
        lead = Text(
            f"Device time of attention alone on {machine.en}: {times.en}.",
            f"仅注意力在 {machine.zh}上的设备时间：{times.zh}。",
        )
        return [lead, _bounds(plan)]
    sentences = []
    for index, phase in enumerate(plan.phases):
        by_time = sorted((_device_seconds(x.phases[index]), x.machine.name, x.machine.kind) for x in timed)
        (low, fast, fast_kind), (high, slow, slow_kind) = by_time[0], by_time[-1]
        name, kinds = words.title(plan, phase), words.KINDS
        sentences.append(
            Text(
                f"{name.en}, device time of attention alone: {seconds(low)} on {fast} ({kinds[fast_kind].en}) to "
                f"{seconds(high)} on {slow} ({kinds[slow_kind].en}).",
                f"{name.zh}，仅注意力的设备时间：从 {fast}（{kinds[fast_kind].zh}）的 {seconds(low)} 到 "
                f"{slow}（{kinds[slow_kind].zh}）的 {seconds(high)}。",
            )
        )
    return sentences


def machine_words(machine: MachineSummary) -> Text:
    """Return a machine's name, and in brackets the source of its times and their error."""
    kind, error = words.KINDS[machine.kind], error_words(machine)
    return Text(f"{machine.name} ({kind.en}, {error.en})", f"{machine.name}（{kind.zh}，{error.zh}）")


def error_words(machine: MachineSummary) -> Text:
    if machine.error is None:
        return words.NOT_MEASURED
    return words.ERROR.format(median=machine.error.median, worst=machine.error.worst)


def tokens_per_second(plan: Plan, phase: PhasePlan) -> str:
    """Return the tokens per second of device time, over the batch; a decode step has one token per sequence."""
    tokens = plan.batch * (1 if phase.phase == "decode" else plan.context)
    return count(tokens / _device_seconds(phase))


def _phase_time(plan: Plan, phase: PhasePlan) -> Text:
    assert phase.timing is not None
    name, time, rate = words.short_name(plan, phase), seconds(_device_seconds(phase)), tokens_per_second(plan, phase)
    total = seconds(phase.timing.seconds)
    launch = Text("", "") if total == time else Text(f"; {total} with launch overhead", f"；含启动开销 {total}")
    return Text(f"{name.en} {time} ({rate} tokens/s{launch.en})", f"{name.zh} {time}（每秒 {rate} 个词元{launch.zh}）")


_BOUNDS_ZH = {
    "matrix": "矩阵单元",
    "exponentials": "指数运算",
    "bandwidth": "内存带宽",
    "launch": "启动开销：启动内核比运行内核更久",
}


def _bounds(plan: Plan) -> Text:
    """Return the resource that bounds each phase."""
    phases: dict[str, list[Text]] = {}
    for phase in plan.phases:
        assert phase.timing is not None
        phases.setdefault(phase.timing.bound, []).append(words.short_name(plan, phase))
    parts = [
        Text(
            f"{' and '.join(name.en for name in names)} bound by {wording.BOUNDS[bound]}",
            f"{'与'.join(name.zh for name in names)}受限于{_BOUNDS_ZH[bound]}",
        )
        for bound, names in phases.items()
    ]
    english = "; ".join(part.en for part in parts)
    return Text(f"{english[:1].upper()}{english[1:]}.", f"{'；'.join(part.zh for part in parts)}。")


def layout(plan: Plan, comparison: Comparison) -> list[Text]:
    """Return how the planned layout compares with MHA and MQA of the same heads."""
    planned = next((point for point in comparison.layouts if point.is_planned), None)
    if planned is None:
        not_compared = Text(
            "These layers are another variant, or differ in their heads: they are not compared with MHA, GQA and MQA.",
            "这些层是另一种变体，或各层的头不同，因此未与 MHA、GQA 和 MQA 比较。",
        )
        listed = Text(" Layouts of the same width and cache are listed below.", "下面列出宽度和缓存相同的布局。")
        return [not_compared if comparison.choices is None else _join(not_compared, listed)]
    lead = Text(f"{plan.model.name} is {_kind_words(planned).en}", f"{plan.model.name} 是 {_kind_words(planned).zh}")
    if planned.cache_bytes_per_token:
        lead = _join(lead, _cache_words(planned, comparison.layouts))
    else:
        parameters = count(planned.parameters)
        lead = _join(lead, Text(f": {parameters} parameters and no cache.", f"：{parameters} 个参数，没有缓存。"))
    return [lead, *_decode_words(planned, comparison.layouts, plan)]


def _kind_words(point: LayoutPoint) -> Text:
    if point.kv_heads is None:
        return Text(f"latent attention ({point.name})", f"潜变量注意力（{point.name}）")
    return Text(f"{point.name} ({plural(point.kv_heads, 'KV head')})", f"{point.name}（{point.kv_heads} 个 KV 头）")


def _cache_words(planned: LayoutPoint, layouts: tuple[LayoutPoint, ...]) -> Text:
    own = size(planned.cache_bytes_per_token)
    sentence = Text(f": {own} of cache per token", f"：每词元缓存 {own}")
    for name in ("MHA", "MQA"):
        other = next(point for point in layouts if point.name == name)
        if other is not planned:
            sentence = _join(sentence, _ratio_words(planned.cache_bytes_per_token, other.cache_bytes_per_token, name))
    return _join(sentence, Text(".", "。"))


def _ratio_words(own: int, other: int, name: str) -> Text:
    if own <= other:
        return Text(f", {other / own:.3g}x less than {name}", f"，是 {name} 的 1/{other / own:.3g}")
    return Text(f", {own / other:.3g}x as much as {name}", f"，是 {name} 的 {own / other:.3g} 倍")


def _decode_words(planned: LayoutPoint, layouts: tuple[LayoutPoint, ...], plan: Plan) -> list[Text]:
    """Compare the device time of the last phase with that of MHA and MQA; empty if the plan has no times."""
    timing = plan.phases[-1].timing
    if plan.machine is None or timing is None:
        return []
    times = {point.name: _device_seconds(point.phases[-1]) for point in layouts}
    name, own = words.title(plan, plan.phases[-1]), times[planned.name]
    others = ", ".join(f"{seconds(times[other])} ({other})" for other in ("MHA", "MQA") if other != planned.name)
    sentences = [
        Text(
            f"{name.en} on {plan.machine.name}: {seconds(own)} of device time, against {others}.",
            f"{name.zh}，在 {plan.machine.name} 上的设备时间：{seconds(own)}，相比 {others}。",
        )
    ]
    if timing.bound == "launch":
        sentences.append(
            Text(
                f"Without a CUDA graph, launching its kernels takes longer: {seconds(timing.seconds)}.",
                f"不使用 CUDA graph 时，启动内核耗时更长：{seconds(timing.seconds)}。",
            )
        )
    return sentences


def _device_seconds(phase: PhasePlan) -> float:
    assert phase.timing is not None
    return phase.timing.device_seconds


def _listed(texts: Iterable[Text]) -> Text:
    english, chinese = zip(*((text.en, text.zh) for text in texts), strict=True)
    return Text(", ".join(english), "，".join(chinese))


def _join(first: Text, second: Text) -> Text:
    return Text(first.en + second.en, first.zh + second.zh)
