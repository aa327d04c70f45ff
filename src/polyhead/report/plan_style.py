"""Style sheet of a plan's page: the light and dark colours of the other pages, and a palette for charts."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: light-dark(#ffffff, #14161d);
  --raised: light-dark(#f6f7f6, #1b1e27);
  --ink: light-dark(#16181d, #e8eaf0);
  --muted: light-dark(#5b616c, #a2a9b8);
  --line: light-dark(#dfe2e4, #333845);
  --p0: light-dark(#2b6a94, #58b4d1);
  --p1: light-dark(#b4531a, #f0954f);
  --p2: light-dark(#4d7d2d, #9ccb6b);
  --p3: light-dark(#8a4a9e, #cf93e2);
  --p4: light-dark(#a3851a, #e6c95a);
  --p5: light-dark(#6b7280, #a2a9b8);
  --p6: light-dark(#c98b9b, #a8596d);
  font: 400 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
p { margin: .4rem 0; }
.muted { color: var(--muted); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; padding: 0; }
.numbers { margin: 1.2rem 0; }
.numbers li { list-style: none; padding: .7rem .9rem; }
.numbers li { background: var(--raised); border: 1px solid var(--line); border-radius: 6px; }
.numbers b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
:focus-visible { outline: 2px solid var(--p0); outline-offset: 2px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 30rem; }
th, td { text-align: right; padding: .25rem .9rem; border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { color: var(--muted); }
th:first-child { text-align: left; }
th.sub { padding-left: 2rem; color: var(--muted); }
tr.total th, tr.total td { font-weight: 600; }
figure { margin: 1rem 0 1.6rem; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font-size: 12px; }
svg .tick { fill: var(--muted); }
svg .grid { stroke: var(--line); }
svg polyline { fill: none; stroke-width: 2.2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; margin: .3rem 0; }
.legend li { list-style: none; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.c0 { fill: var(--p0); } .l0 { stroke: var(--p0); } .k0 { background: var(--p0); }
.c1 { fill: var(--p1); } .l1 { stroke: var(--p1); } .k1 { background: var(--p1); }
.c2 { fill: var(--p2); } .l2 { stroke: var(--p2); } .k2 { background: var(--p2); }
.c3 { fill: var(--p3); } .l3 { stroke: var(--p3); } .k3 { background: var(--p3); }
.c4 { fill: var(--p4); } .l4 { stroke: var(--p4); } .k4 { background: var(--p4); }
.c5 { fill: var(--p5); } .l5 { stroke: var(--p5); } .k5 { background: var(--p5); }
.c6 { fill: var(--p6); } .l6 { stroke: var(--p6); } .k6 { background: var(--p6); }
"""
