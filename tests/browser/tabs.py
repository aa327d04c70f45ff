"""Browser tabs, reused between tests because opening one is slow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 60_000  # milliseconds; tests must also pass on a busy machine
EMPTY = "about:blank"
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`);
});
"""


@dataclass
class Tab:
    """A tab in a context of its own, with the errors since it was taken."""

    page: Any
    kind: str  # the options of its context
    is_expected: Callable[[str], bool]  # True for an address that the page may request
    problems: list[str] = field(default_factory=list)
    color_scheme: str = "light"  # as a context has it by default
    permissions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.page.add_init_script(WATCH)
        self.page.on("console", self._logged)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._requested)

    def change_scheme(self, color_scheme: str) -> None:
        """Set the preferred colour scheme of the system."""
        if self.color_scheme != color_scheme:
            self.page.emulate_media(color_scheme=color_scheme)
        self.color_scheme = color_scheme

    def change_size(self, viewport: tuple[int, int]) -> None:
        size = {"width": viewport[0], "height": viewport[1]}
        if self.page.viewport_size != size:
            self.page.set_viewport_size(size)

    def _requested(self, request: Any) -> None:
        if not (self.is_expected(request.url) or request.url.startswith(("data:", "blob:"))):
            self.problems.append(f"requested {request.url}")

    def _logged(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")


class Tabs:
    """The tabs of one browser. A returned tab is reset: storage, routes, permissions, pointer and problems."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.free: dict[str, list[Tab]] = {}

    def take(
        self,
        is_expected: Callable[[str], bool],
        *,
        viewport: tuple[int, int] = (1280, 800),
        color_scheme: str = "light",
        permissions: tuple[str, ...] = (),
        **options: Any,
    ) -> Tab:
        """Return an empty tab; `options` are those of a context that cannot be changed later."""
        size, kind = {"width": viewport[0], "height": viewport[1]}, repr(sorted(options.items()))
        if self.free.get(kind):
            tab = self.free[kind].pop()
            tab.is_expected, tab.problems = is_expected, []
        else:
            context = self.browser.new_context(viewport=size, **options)
            context.set_default_timeout(PATIENCE)
            tab = Tab(context.new_page(), kind, is_expected)
        tab.change_size(viewport)
        tab.change_scheme(color_scheme)
        if permissions:
            tab.page.context.grant_permissions(list(permissions))
        tab.permissions = permissions
        return tab

    def give_back(self, tabs: list[Tab]) -> None:
        """Reset tabs for the next test; close one that cannot be reset."""
        for tab in tabs:
            page, context = tab.page, tab.page.context
            try:
                for other in context.pages:
                    if other != page:
                        other.close()
                page.unroute_all()
                if page.url != EMPTY:
                    page.evaluate("localStorage.clear()")
                    page.goto(EMPTY)
                if tab.permissions:
                    context.clear_permissions()
                page.mouse.move(0, 0)
            except Exception:
                context.close()
                raise
            self.free.setdefault(tab.kind, []).append(tab)


class SharedPage:
    """A page that stays open between tests, and is reloaded after a failed one."""

    def __init__(self, opening: Callable[[], AbstractContextManager[Any]]) -> None:
        self.opening = opening
        self.opened: Any = None
        self.stack = ExitStack()

    def take(self) -> Any:
        if self.opened is None:
            self.opened = self.stack.enter_context(self.opening())
        return self.opened

    def leave(self, has_failed: bool) -> None:
        """Check the page after a test, and close it if anything is wrong."""
        opened, is_well = self.opened, False
        if opened is None:
            return  # it could not be opened
        try:
            if not has_failed:
                opened.check()
                is_well = True
        finally:
            if not is_well:
                opened.of.problems.clear()  # this test reports them
                self.close()

    def close(self) -> None:
        self.opened = None
        self.stack.close()
