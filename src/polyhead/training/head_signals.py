"""Outputs of heads to the residual stream and gradients through them, reduced on the device during a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyhead.observation.accumulators import Histogram, Sums, accumulator_dtype
from polyhead.observation.calls import Call
from polyhead.observation.collectors import Collected
from polyhead.observation.compiled import CompiledModules, compiled_callers, compiled_modules
from polyhead.observation.nested_sessions import is_gated_by_another
from polyhead.observation.output_projections import candidate_projections, output_matrix, reads_heads, wrapper_of
from polyhead.observation.recomputation import hidden_operators, is_recomputed
from polyhead.observation.session import Session
from polyhead.observation.statistics import AttentionSite
from polyhead.observation.torch_modules import has_own_forward
from polyhead.ops.attention import AttentionOutput
from polyhead.ops.common.head_sums import CountedTokens, count_tokens, product, quadratic_forms, squared_norms
from polyhead.training.head_history import COSINES

LOW_ENTROPY = "normalized_entropy_p10"
COLUMNS = (LOW_ENTROPY, "output_norm", "output_norm_share", "gradient_norm", *COSINES)
_ENTROPY, _OUTPUTS = "entropy histogram", "head outputs"  # names of states in a session, and of signals
_TOKENS, _GRADIENTS, _GRADIENT_PRODUCTS = "tokens", "squared gradients", "gradient products"  # of signals
SIGNALS = {  # the signal that a column is computed from
    LOW_ENTROPY: _ENTROPY,
    "output_norm": _OUTPUTS,
    "output_norm_share": _OUTPUTS,
    "gradient_norm": _GRADIENTS,
    "output_cosine": _OUTPUTS,
    "gradient_cosine": _GRADIENT_PRODUCTS,
}
GRADIENTS = (_GRADIENTS, _GRADIENT_PRODUCTS)  # signals that are sums of squares or products of gradients
SignalSums = dict[str, list[Tensor | None]]  # by signal, then by site


@dataclass(frozen=True, slots=True, eq=False)
class OutputSums(Sums):
    """Sums over tokens of inner products of what heads write."""

    count: Tensor  # number of tokens
    products: Tensor  # [heads]: of each head with itself; [heads, heads] in a step with pairs


class _Gradients(NamedTuple):
    """Sums over tokens of a step's gradients through the heads of a site."""

    squares: Tensor  # [heads]: squared norm of the gradient of the loss with respect to the head's output
    products: Tensor | None  # [heads, heads], of the gradients multiplied by W_O, in a step with pairs


class _Awaited(NamedTuple):
    """An attention call whose head outputs are yet to be read by the output projection."""

    call: Call
    heads: Tensor | None  # outputs of the heads, where they are read: until the output projection is known, or shared
    sizes: tuple[int, int]  # heads and value_dim
    counted: CountedTokens  # non-padding tokens with a visible key
    non_padding: Tensor | None  # [batch or 1, queries]
    weights: list[Tensor]  # of the output projection that has read the heads, once it has


class HeadSignals:
    """Reads the head outputs and gradients of a monitor's session.

    Sums of outputs are part of the session's observations and are counted with its forwards; those of gradients are
    added by the backwards of the step.

    Args:
        session: session of the monitor.
        columns: which of `COLUMNS` are recorded.
        inverse_scale: returns the factor by which gradients on a device are multiplied, a number or a tensor there.
    """

    def __init__(
        self, session: Session, columns: tuple[str, ...], inverse_scale: Callable[[torch.device], Tensor | float]
    ) -> None:
        self.with_pairs = False  # in this step
        self.has_half_autocast = False  # whether a forward was in float16 autocast
        self._session, self._columns, self._inverse_scale = session, columns, inverse_scale
        self._reads_outputs = any(name != LOW_ENTROPY for name in columns)
        self._linears: dict[AttentionSite, nn.Module] = {}  # output projections, once found
        self._candidates: dict[nn.Module, str] = {}  # linear layers that may be output projections, and their paths
        self._wrappers: dict[nn.Module, nn.Module] = {}  # of output projections: what computes more from their input
        self.is_searching = True  # until the first observed step has ended
        self._factors: dict[AttentionSite, None] = {}  # sites with factors between attention and output projection
        self._callers: tuple[list[nn.Module], bool] = ([], False)  # what is compiled around the model
        self._torch_names: dict[nn.Module, str] = {}  # of `torch.nn.MultiheadAttention`
        self._awaited: dict[AttentionSite, _Awaited] = {}
        self._unread: set[AttentionSite] = set()  # sites with outputs in this step that are not part of their sums
        self._gradients: dict[AttentionSite, _Gradients | None] = {}  # None: not known
        self._forwards: Counter[AttentionSite] = Counter()  # in this step, less the backwards
        self._hooks: list[RemovableHandle] = []
        session.listener = self._listen if columns else None

    def search(self) -> None:
        """Find the output projections anew in the next observed step; modules may have been replaced."""
        self.is_searching, self._linears, self._factors, self._callers = True, {}, {}, ([], False)
        self._wrappers = {}

    def attach(self) -> None:
        """Start to read the output projections, after the session was entered."""
        modules = self._session.possible_modules
        if self.is_searching:
            self._candidates = candidate_projections(self._session.model, modules)
            names = {module: name or type(module).__name__ for name, module in self._session.model.named_modules()}
            self._torch_names = {x: names[x] for x in modules if isinstance(x, nn.MultiheadAttention)}
            self._hooks = [modules[0].register_forward_pre_hook(lambda *args: self._read_callers())]
        linears = [*self._candidates] if self.is_searching else [*dict.fromkeys(self._linears.values())]
        if self._reads_outputs and self._session.compiled is None:
            # Functions, which a copy of the model shares; a bound method would copy the session with it.
            # After the layer, whose pre-hooks may change what it reads; before hooks that reshard its weight.
            self._hooks += [x.register_forward_hook(lambda *args: self._read(*args), prepend=True) for x in linears]
            # Before hooks that change the output, which would change its gradient.
            self._hooks += [
                x.register_forward_hook(lambda *args: self._read_torch(*args), prepend=True) for x in self._torch_names
            ]

    def detach(self) -> None:
        """Stop to read, before the session is exited."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._awaited.clear()

    def discard(self) -> None:
        """Start the step again; backwards of earlier forwards no longer count."""
        self._gradients, self._forwards, self._unread = {}, Counter(), set()
        self._awaited.clear()

    def end_step(self) -> None:
        """Start the next step, in which the output projections are known if they were found in this one."""
        self.discard()
        if self.is_searching and len(self._hooks):
            self.is_searching = False
            self.detach()
            self.attach()

    def compiled(self) -> tuple[CompiledModules | None, str]:
        """Return how the session observes the compiled code of the model, or None; and why it does not, if it has any.

        Call it in the first observed step, after its forwards.
        """
        around, is_in_function = self._callers
        compiled = [*around, *compiled_modules(self._session.model)]
        if is_in_function:
            return None, "it is called by a compiled function; compile the model itself"
        if not len(compiled):
            return None, ""
        if len(self._factors):
            return None, f"{next(iter(self._factors)).name} has gates or norms between attention and output projection"
        return self._session.traced_modules(compiled)

    # ---- called in forwards

    def _read_callers(self) -> None:
        if self._session.model.training and not is_recomputed():
            self._callers = compiled_callers()

    @torch.no_grad()
    def _listen(self, call: Call, result: AttentionOutput, non_padding: Tensor | None) -> None:
        rows, output = result.statistics, result.output
        assert rows is not None and rows.visible_keys is not None
        entropy = rows.entropy if call.counts and LOW_ENTROPY in self._columns else None
        if entropy is None and not self._reads_outputs:
            return
        counted = count_tokens(
            rows.visible_keys, non_padding, entropy, bins=Histogram.BINS, learned_sinks=call.learned_sinks
        )
        if counted.entropies is not None:
            self._session.add_state(call.site, _ENTROPY, Histogram(counted.entropies))
        if not self._reads_outputs:
            return
        device = output.device.type
        is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        self.has_half_autocast |= is_half or call.half_autocast
        is_unknown = self.is_searching and call.site not in self._linears
        is_compared = is_unknown or self._is_projection_shared(call.site)
        heads = output.detach() if is_compared or call.site.name in self._torch_names.values() else None
        sizes, weights = (output.shape[1], output.shape[3]), list[Tensor]()
        self._mark_unread(call.site)
        awaited = _Awaited(call, heads, sizes, counted, non_padding, weights)
        if self._session.compiled is None:
            self._awaited[call.site] = awaited
        else:  # the output projection has no hook; in the first observed step it has read the heads as they are
            linear = self._linears.get(call.site)
            is_unknown = linear is None or is_gated_by_another(self._session, linear)
            matrix = None if linear is None or is_unknown else self._matrix(linear, output.device)
            self._add_outputs(awaited, output.transpose(1, 2), matrix)
        self._forwards[call.site] += call.counts
        hook = self._gradient_hook(call.site, counted.tokens, weights)
        if call.is_compiled:
            call.gradient_hook = hook
        elif output.requires_grad:
            output.register_hook(hook)

    @hidden_operators()
    def _read(self, linear: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        """Add what the input of an output projection writes; the first such input is compared with the heads."""
        if not len(inputs) or not isinstance(inputs[0], Tensor):
            return
        if self.is_searching:
            for site, awaited in self._awaited.items():
                if awaited.heads is not None and reads_heads(inputs[0], awaited.heads):
                    self._linears[site] = linear
                    self._wrappers[linear] = self._wrapper_of(linear, site)
                    if not torch.equal(inputs[0].flatten(), awaited.heads.transpose(1, 2).flatten()):
                        self._factors[site] = None
        sites = [site for site in self._awaited if self._linears.get(site) is linear]
        if len(sites) > 1:  # attention calls that share their projection, of which this input is one
            read = {site: self._awaited[site].heads for site in sites}
            sites = [site for site, heads in read.items() if heads is not None and reads_heads(inputs[0], heads)]
        for site in sites:
            awaited = self._awaited.pop(site)
            awaited.weights.append(linear.weight.detach())  # type: ignore[operator]
            self._add_outputs(awaited, inputs[0], self._matrix(linear, inputs[0].device))

    @hidden_operators()
    def _read_torch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add what `torch.nn.MultiheadAttention` writes, whose attention was recomputed without dropout."""
        assert isinstance(module, nn.MultiheadAttention)
        name = self._torch_names.get(module)
        site = next((site for site in self._awaited if site.name == name), None)
        if site is None:
            return
        awaited, linear = self._awaited.pop(site), module.out_proj
        matrix = self._matrix(linear, output[0].device)
        if matrix is None or awaited.heads is None or is_gated_by_another(self._session, module):
            self._unread.add(site)
            return
        self._add_outputs(awaited, awaited.heads.transpose(1, 2), matrix)
        if output[0].requires_grad and not has_own_forward(module):  # which may change what it returns
            weights = [linear.weight.detach()]
            add, is_batched = self._gradient_hook(site, awaited.counted.tokens, weights, linear), output[0].ndim == 3
            sizes = awaited.sizes

            def project(grad: Tensor) -> None:
                grad = grad if is_batched else grad[None]
                grad = grad if module.batch_first or not is_batched else grad.transpose(0, 1)
                with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                    add((grad @ matrix.T.to(grad.dtype)).unflatten(-1, sizes).transpose(1, 2))

            output[0].register_hook(project)

    def _wrapper_of(self, linear: nn.Module, site: AttentionSite) -> nn.Module:
        model, names = self._session.model, [x.name.partition("#")[0] for x in (*self._linears, site)]
        reporting = [x for x in self._session.attention_modules if not isinstance(x, nn.MultiheadAttention)]
        calling = [module for path, module in model.named_modules() if (path or type(module).__name__) in names]
        return wrapper_of(model, self._candidates[linear], {id(x) for x in (*reporting, *calling)})

    def _is_projection_shared(self, site: AttentionSite) -> bool:
        linear = self._linears.get(site)
        return linear is not None and sum(x is linear for x in self._linears.values()) > 1

    def _mark_unread(self, site: AttentionSite) -> None:
        if site in self._awaited and self._awaited[site].call.counts:
            self._unread.add(site)

    def _matrix(self, linear: nn.Module, device: torch.device) -> Tensor | None:
        return output_matrix(linear, self._wrappers.get(linear, linear), device)

    def _matrix_of_forward(self, linear: nn.Module, weights: list[Tensor], device: torch.device) -> Tensor | None:
        """Return W_O as the forward used it, whose weight `torch.func.functional_call` may have replaced."""
        matrix = self._matrix(linear, device)
        if matrix is None or not len(weights) or weights[-1].data_ptr() == linear.weight.data_ptr():  # type: ignore[operator]
            return matrix
        is_plain = self._wrappers.get(linear, linear) is linear
        return (weights[-1].T if isinstance(linear, nn.Linear) else weights[-1]) if is_plain else None

    def _add_outputs(self, awaited: _Awaited, read: Tensor, matrix: Tensor | None) -> None:
        call, (heads, dim), tokens = awaited.call, awaited.sizes, awaited.counted.tokens
        if not call.counts:
            return
        if matrix is None or read.numel() != tokens.numel() * heads * dim:
            self._unread.add(call.site)
            return
        read, matrices = read.detach().reshape(-1, heads, dim), matrix.unflatten(0, (heads, dim))
        # A row that sees no key is zero, unless a bias masks the keys.
        has_biases = call.mask is not None and len(call.mask.biases) > 0
        rows = tokens if awaited.non_padding is not None or call.is_compiled or has_biases else None
        dtype = accumulator_dtype(read.device)
        if self.with_pairs:
            read = read if rows is None else torch.where(rows.reshape(-1, 1, 1), read, 0.0)
            products = _pair_products(read, matrices, dtype)
        else:
            with torch.autocast(read.device.type, enabled=False):
                products = quadratic_forms(read, product(matrices, matrices.mT), rows, dtype)
        self._session.add_state(call.site, _OUTPUTS, OutputSums(awaited.counted.number, products))

    # ---- called in backwards

    def _gradient_hook(
        self, site: AttentionSite, tokens: Tensor, weights: list[Tensor], linear: nn.Module | None = None
    ) -> Any:
        """Return a hook that adds the gradient with respect to head outputs [batch, heads, queries, dim] to the step's.

        The norm of the sum of two gradients is not known from their norms, so a second backward through the same
        forward makes the site's gradients of this step unknown.
        """
        gradients, forwards, with_pairs, has_run = self._gradients, self._forwards, self.with_pairs, False

        @torch.no_grad()
        def add(grad: Tensor) -> None:
            nonlocal has_run
            forwards[site] -= 1  # below 0: compiled code that was recomputed twice
            if has_run or forwards[site] < 0 or gradients.get(site, ()) is None:
                gradients[site] = None
                return
            has_run = True
            dtype = accumulator_dtype(grad.device)
            squares, factor = squared_norms(grad, tokens, dtype), self._inverse_scale(grad.device)
            squares = squares if isinstance(factor, float) else squares * factor.square()
            products, matrix, projection = None, None, linear or self._linears.get(site)
            if with_pairs and projection is not None:
                matrix = self._matrix_of_forward(projection, weights, grad.device)
            if matrix is not None:
                by_token = torch.where(tokens[..., None, None], grad.transpose(1, 2), 0.0).flatten(0, 1)
                products = _pair_products(by_token, matrix.unflatten(0, by_token.shape[1:]), dtype)
            before = gradients.get(site)
            if before is not None:
                squares = before.squares + squares
                is_known = products is not None and before.products is not None
                products = before.products + products if is_known else None  # type: ignore[operator]
            gradients[site] = _Gradients(squares, products)

        return add

    # ---- results

    def sums_of(self, sites: Sequence[AttentionSite], collected: Collected) -> SignalSums:
        """Return the sums of a step by signal and site, None where they are not known.

        Args:
            sites: attention sites of the model.
            collected: states of the sites in the observations of the step.
        """
        for site in sites:
            self._mark_unread(site)
        states = [collected.get(site, {}) for site in sites]
        sums = [None if site in self._unread else x.get(_OUTPUTS) for site, x in zip(sites, states, strict=True)]
        gradients = [self._gradients.get(site) for site in sites]
        return {
            _ENTROPY: [x.counts if isinstance(x, Histogram) else None for x in (x.get(_ENTROPY) for x in states)],
            _TOKENS: [x.count if isinstance(x, OutputSums) else None for x in sums],
            _OUTPUTS: [x.products if isinstance(x, OutputSums) else None for x in sums],
            _GRADIENTS: [None if x is None else x.squares for x in gradients],
            _GRADIENT_PRODUCTS: [None if x is None else x.products for x in gradients],
        }

    def shapes_of(self, heads: Sequence[int]) -> dict[str, list[tuple[int, ...]]]:
        """Return the shapes of `sums_of` for sites of so many heads, without what is not recorded in this step.

        Args:
            heads: number of heads of each site.
        """
        shapes: dict[str, list[tuple[int, ...]]] = {}
        if LOW_ENTROPY in self._columns:
            shapes[_ENTROPY] = [(size, Histogram.BINS + 1) for size in heads]
        if self._reads_outputs:
            pairs = [(size, size) for size in heads]
            single = [(size,) for size in heads]
            shapes |= {_TOKENS: [()] * len(heads), _OUTPUTS: [*pairs] if self.with_pairs else [*single]}
            shapes |= {_GRADIENTS: [*single], **({_GRADIENT_PRODUCTS: [*pairs]} if self.with_pairs else {})}
        return shapes


def columns_of(sums: SignalSums) -> tuple[dict[str, list[Tensor | None]], dict[str, list[Tensor | None]]]:
    """Return the columns of sites, [heads] each, and their cosines, [heads, heads]; None where not measured.

    Args:
        sums: sums of a step by signal and site.
    """
    outputs = sums[_OUTPUTS]
    squares = for_each(lambda x: (x.diagonal(0, 1, 2) if x.ndim == 3 else x).clamp_min(0.0), outputs)  # rounding
    pairs: dict[str, list[Tensor | None]] = {
        "output_cosine": [x if x is not None and x.ndim == 2 else None for x in outputs],
        "gradient_cosine": sums[_GRADIENT_PRODUCTS],
    }
    several = {name: [x if x is not None and len(x) > 1 else None for x in parts] for name, parts in pairs.items()}
    cosines = {name: for_each(_cosines, parts) for name, parts in several.items()}
    columns = {
        LOW_ENTROPY: for_each(lambda x: Histogram(x).quantile(0.1), sums[_ENTROPY]),
        "output_norm": for_each(_root_mean_square, squares, sums[_TOKENS]),
        "output_norm_share": for_each(_shares, squares),
        "gradient_norm": for_each(torch.sqrt, sums[_GRADIENTS]),
    }
    return columns | {name: for_each(_strongest, x) for name, x in cosines.items()}, cosines


def for_each(compute: Callable[..., Tensor], *parts: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return a function of the tensors of each site, computed for all sites of one shape at once; None without them.

    Args:
        compute: function of stacked tensors, [sites, ...], that returns the results of the sites.
        parts: for each argument of the function, the tensors of the sites.
    """
    results: list[Tensor | None] = [None] * len(parts[0])
    groups: dict[tuple[torch.Size, torch.device], list[int]] = {}
    for index, part in enumerate(parts[0]):
        if part is not None:
            groups.setdefault((part.shape, part.device), []).append(index)
    for group in groups.values():
        stacked = [torch.stack([x for index in group if (x := part[index]) is not None]) for part in parts]
        for index, result in zip(group, compute(*stacked).unbind(0), strict=True):
            results[index] = result
    return results


def _root_mean_square(squares: Tensor, count: Tensor) -> Tensor:
    return torch.where(count > 0, squares.T / count, torch.nan).sqrt().T


def _shares(squares: Tensor) -> Tensor:
    """Return the share of each head in the sum of its site, 0 where all are zero."""
    total = squares.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, squares / total)


def _pair_products(read: Tensor, matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums over tokens of the inner products of all pairs of heads, [heads, heads].

    Of read [tokens, heads, dim] times matrices [heads, dim, width], x_i = z_i W_i: the sum of x_i x_j^T is that of all
    elements of (sum z_i^T z_j) * (W_i W_j^T), so that no output of a single head is ever computed.
    """
    heads, dim, _ = matrices.shape
    with torch.autocast(read.device.type, enabled=False):
        joined, joined_matrices = read.flatten(1)[None], matrices.flatten(0, 1)[None]
        products = product(joined.mT, joined) * product(joined_matrices, joined_matrices.mT)
        return products.view(heads, dim, heads, dim).sum((1, 3), dtype=dtype)


def _cosines(products: Tensor) -> Tensor:
    """Return cosines from inner products [sites, heads, heads]; 0 for heads that are zero."""
    norms = products.diagonal(0, 1, 2).clamp_min(0.0).sqrt()
    scale = norms[:, :, None] * norms[:, None]
    return torch.where(scale == 0, 0.0, (products / scale).clamp(-1, 1))


def _strongest(cosines: Tensor) -> Tensor:
    """Return the cosine of largest magnitude of each head with another of its site, [sites, heads]."""
    others = cosines.masked_fill(torch.eye(cosines.shape[1], dtype=torch.bool, device=cosines.device), 0.0)
    return others.gather(2, others.abs().argmax(2, keepdim=True))[..., 0]
