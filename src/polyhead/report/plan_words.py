"""Words of a plan's page in English and Chinese; what the cost model writes itself (notes, warnings) is English."""

from __future__ import annotations

from polyhead.analysis.languages import Text
from polyhead.costs import plan_wording as wording
from polyhead.costs.phases import USABLE, PhasePlan
from polyhead.costs.planning import Plan

VIEWS = {
    "fit": Text("Will it fit?", "放得下吗？"),
    "speed": Text("How fast?", "有多快？"),
    "layout": Text("Which layout?", "选哪种布局？"),
    "numbers": Text("All numbers", "全部数字"),
}
ATTENTION_ONLY = Text(
    "Attention layers only: embeddings, feed-forward layers and optimizer state come on top.",
    "只计注意力层：嵌入、前馈层和优化器状态需另加。",
)


def fit_scope(plan: Plan) -> Text:
    """Return the memory that the answers to "will it fit" do not include."""
    scope = wording.fit_scope(plan)
    weights = "" if plan.model.other_parameters is not None else "注意力之外的权重、优化器状态、"
    return Text(
        f"✓ {scope}; ~ tight: more than that; ✗ more than the memory.",
        f"✓ 放得下：至多占内存的 {USABLE:.0%}，因为{weights}其他激活值、logits 和 CUDA 上下文需另加；"
        "~ 紧张：超过此值；✗ 超过内存。",
    )


def counted(plan: Plan, phase: PhasePlan) -> Text:
    """Return the parts of the memory that a phase needs."""
    chinese = "仅注意力"
    if plan.model.other_parameters is not None:
        parts = "权重、梯度和 AdamW 状态（每个参数 8 字节）" if phase.phase == "training" else "权重"
        cache = "、缓存" if plan.model.is_causal and phase.phase != "training" else ""
        checkpointed = "，其他层使用激活检查点" if phase.phase == "training" else ""
        chinese = f"全部{parts}{cache}，以及注意力的激活值{checkpointed}"
    return Text(wording.counted(plan, phase.phase), chinese)


KINDS = {"measured": Text("measured", "实测"), "datasheet": Text("datasheet estimate", "数据表估计")}
NOT_MEASURED = Text("error not measured", "误差未测")
TIMES = Text(
    "Times and tokens/s are those of attention alone. Device time is that of the kernels, as under a CUDA graph; "
    "eager time has the launch overhead of every call.",
    "时间和每秒词元数都只计注意力。设备时间只计内核，如同使用 CUDA graph；eager 时间包含每次调用的启动开销。",
)
NO_TIMES = Text("not measured", "未测")
DEVICE_TIME = Text("device time, {phase}", "{phase}的设备时间")
ERROR = Text("median error {median:.0%}, worst {worst:.0%}", "误差中位数 {median:.0%}，最大 {worst:.0%}")
NAMES = {
    "projection": Text("projection", "投影"),
    "positions, norms": Text("positions, norms", "位置、归一化"),
    "cache writes": Text("cache writes", "写缓存"),
    "attention": Text("attention", "注意力"),
    "scores": Text("scores", "分数"),
    "softmax": Text("softmax", "softmax"),
    "values": Text("values", "值"),
    "head mixing": Text("head mixing", "头混合"),
    "mixing": Text("head mixing", "头混合"),
    "output": Text("output", "输出"),
    "waiting for launches": Text("waiting for launches", "等待启动"),
    "total": Text("total", "合计"),
    "parameters": Text("parameters", "参数"),
    "gradients": Text("gradients", "梯度"),
    "cache": Text("cache", "缓存"),
    "activations": Text("activations", "激活"),
}
COLUMNS = {
    "FLOPs": Text("FLOPs", "FLOPs"),
    "exponentials": Text("exponentials", "指数运算"),
    "bytes moved": Text("bytes moved", "访存字节"),
    "time": Text("time", "时间"),
    "device time": Text("device time", "设备时间"),
    "machine": Text("machine", "机器"),
    "memory": Text("memory", "内存"),
    "layout": Text("layout", "布局"),
    "cache per token": Text("cache per token", "每词元缓存"),
    "context": Text("context", "上下文"),
    "fused": Text("fused", "融合"),
    "materialised": Text("materialised", "物化权重"),
    "heads": Text("heads", "头"),
    "layers": Text("layers", "层"),
    **{name: NAMES[name] for name in ("parameters", "cache", "activations", "total")},
}
COLLECTIVE_COLUMNS = {
    "pass": Text("pass", "方向"),
    "operation": Text("operation", "操作"),
    "ranks of": Text("ranks of", "进程组"),
    "calls": Text("calls", "次数"),
    "per call": Text("per call", "每次"),
    "sent": Text("sent", "发送"),
    "time": COLUMNS["time"],
}
OVER_RANKS = Text("Over ranks", "多个进程")
SENT = Text("{phase}: bytes that a rank sends", "{phase}：每个进程发送的字节")
# By phase; "forward" is the prefill of a model that is not causal.
_SHORT_NAMES = {
    "training": Text("training step", "训练一步"),
    "prefill": Text("prefill", "预填充"),
    "decode": Text("decode step", "解码一步"),
    "forward": Text("forward", "前向"),
}
_TITLES = {
    "training": Text("Training step, forward and backward", "训练一步：前向与反向"),
    "prefill": Text("Prefill of the full context", "整个上下文的预填充"),
    "decode": Text("Decode step, last token of the context", "解码一步：上下文的最后一个词元"),
    "forward": Text("Forward over the full context", "整个上下文的前向"),
}
_DOING = {
    "training": Text("Training", "训练"),
    "prefill": Text("Prefill", "预填充"),
    "decode": Text("Decoding", "解码"),
    "forward": Text("A forward pass", "前向"),
}


def title(plan: Plan, phase: PhasePlan) -> Text:
    return _TITLES[_kind(plan, phase)]


def short_name(plan: Plan, phase: PhasePlan) -> Text:
    return _SHORT_NAMES[_kind(plan, phase)]


def doing(plan: Plan, phase: PhasePlan) -> Text:
    return _DOING[_kind(plan, phase)]


def _kind(plan: Plan, phase: PhasePlan) -> str:
    return "forward" if phase.phase == "prefill" and not plan.model.is_causal else phase.phase
