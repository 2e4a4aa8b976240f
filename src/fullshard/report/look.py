"""The page's style and script. Charts take their colours from the style, so that both follow light and dark mode."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --raised: #ffffff; --sunken: #f1f2f3; --text: #1d2126; --soft: #59616b; --line: #dfe2e6;
  --grid: #e8eaed; --accent: #1f5fa8; --good: #1b7a46;
  --blue: #2f6fb7; --blue-faint: rgba(47,111,183,.28); --teal: #1d8f8a; --teal-faint: rgba(29,143,138,.28);
  --purple: #7d5fb8; --orange: #c87a2a; --orange-faint: rgba(200,122,42,.28); --gold: #c9aa3c; --slate: #98a1ab;
  --signal: #d6263a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --raised: #1b1f23; --sunken: #22272c; --text: #e7eaed; --soft: #a3acb6; --line: #30363d;
    --grid: #2a3036; --accent: #7db4f0; --good: #62c48d;
    --blue: #5b9be0; --blue-faint: rgba(91,155,224,.3); --teal: #3fb6ae; --teal-faint: rgba(63,182,174,.3);
    --purple: #a48be0; --orange: #e09a4f; --orange-faint: rgba(224,154,79,.3); --gold: #d9be5d; --slate: #7d8791;
    --signal: #ff5a68;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif;
}
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 28px; }
header { padding-top: 44px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 0 0 14px; letter-spacing: -.005em; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
p { margin: 0 0 10px; max-width: 74ch; }
.lead { color: var(--soft); margin: 6px 0 0; }
.state { font-weight: 600; color: var(--good); }
.state.open { color: var(--orange); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 22px 0 0;
  border-bottom: 1px solid var(--line); padding-bottom: 12px; font-size: 14px; }
a { color: var(--accent); text-decoration: none; }
a:hover, a:focus-visible { text-decoration: underline; }
section { padding: 34px 0 6px; }
section + section { border-top: 1px solid var(--line); margin-top: 26px; }
.score { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 18px; margin: 0 0 18px; }
.score b { font-size: 46px; line-height: 1; font-weight: 650; letter-spacing: -.025em;
  font-variant-numeric: tabular-nums; }
.score span { color: var(--soft); }
.beside { max-width: 560px; margin: 0 0 24px; }
.beside div { display: grid; grid-template-columns: minmax(110px, 190px) 1fr 76px; gap: 12px; align-items: center;
  padding: 3px 0; font-size: 14px; font-variant-numeric: tabular-nums; }
.beside span:first-child { overflow-wrap: anywhere; }
.beside span:last-child { text-align: right; }
.bar { background: var(--sunken); height: 10px; border-radius: 5px; overflow: hidden; display: block; }
.bar i { display: block; height: 100%; background: var(--blue); border-radius: 5px; }
.bar i.plain { background: var(--slate); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); gap: 1px; margin: 16px 0 0;
  background: var(--raised); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.tiles div { padding: 12px 16px; box-shadow: 0 0 0 1px var(--line); }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.tiles small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); line-height: 1.4; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; background: var(--raised); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 14px 6px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure .head { display: flex; justify-content: space-between; align-items: center; gap: 12px; padding: 0 4px; }
figcaption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
select { font: inherit; font-size: 13px; color: inherit; background: var(--sunken); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 8px; }
.note { color: var(--soft); font-size: 13.5px; margin: 12px 0 0; }
.scroll { overflow-x: auto; margin-top: 16px; border: 1px solid var(--line); border-radius: 10px;
  background: var(--raised); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 12px 14px 8px; }
th, td { text-align: left; padding: 6px 14px; border-top: 1px solid var(--line); vertical-align: top;
  font-weight: 400; }
thead th { color: var(--soft); font-size: 12.5px; vertical-align: bottom; border-top: 0; }
.number { text-align: right; white-space: nowrap; }
thead .number { white-space: normal; }
tbody th { white-space: nowrap; }
.texts td { width: 32%; }
.texts td:nth-child(4) { width: 4%; white-space: nowrap; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 12em; overflow-y: auto; }
.text + .text { border-top: 1px dashed var(--line); margin-top: 6px; padding-top: 6px; }
.seen th { width: 1%; color: var(--soft); }
.seen tr + tr > * { border-top-style: dashed; }
.seen tbody + tbody tr:first-child > * { border-top: 3px solid var(--line); }
.seen .text { max-height: 16em; }
.seen .target th { color: var(--good); font-weight: 600; }
.seen .target td { background: color-mix(in srgb, var(--good) 12%, transparent); }
.same { color: var(--good); }
.differs { color: var(--signal); }
details { margin-top: 16px; }
summary { cursor: pointer; color: var(--accent); }
pre { overflow-x: auto; background: var(--raised); border: 1px solid var(--line); border-radius: 10px; padding: 14px;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
ul.notes { margin: 14px 0 0; padding-left: 20px; font-size: 14px; }
ul.notes li { white-space: pre-line; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 13px; padding-top: 30px; padding-bottom: 40px; }
@media (max-width: 760px) { .charts { grid-template-columns: minmax(0, 1fr); }
  header, main, footer { padding-inline: 16px; } }
@media print { nav, select { display: none; } figure, .scroll { break-inside: avoid; } }
"""

SCRIPT = """
(async () => {
  if (!("DecompressionStream" in window)) {
    document.getElementById("old").hidden = false;
    return;
  }
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (one) => one.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const library = document.createElement("script");
  library.textContent = await new Response(unpacked).text();
  document.head.append(library);
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const chosen = {};
  const paint = (value, style) => {
    if (typeof value === "string")
      return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    if (Array.isArray(value))
      return typeof value[value.length - 1] === "number" ? value : value.map((one) => paint(one, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, paint(one, style)]));
    return value;
  };
  const axis = { gridcolor: "var(--grid)", linecolor: "var(--line)", zerolinecolor: "var(--grid)", automargin: true,
    ticks: "", exponentformat: "e", minexponent: 5, separatethousands: true,
    title: { font: { size: 12, color: "var(--soft)" }, standoff: 8 },
    tickfont: { size: 11.5, color: "var(--soft)" } };
  const merge = (one, two) => {
    const both = { ...one };
    for (const [key, value] of Object.entries(two))
      both[key] = value && typeof value === "object" && !Array.isArray(value) ? merge(both[key] || {}, value) : value;
    return both;
  };
  const base = { autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 54, r: 14, t: 34, b: 44 }, xaxis: axis, yaxis: axis, dragmode: "zoom",
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" },
    hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--line)", font: { size: 12.5, color: "var(--text)" } },
    font: { family: getComputedStyle(document.body).fontFamily, color: "var(--text)", size: 12.5 } };
  const draw = (name) => {
    const style = getComputedStyle(document.documentElement);
    const { data, layout } = figures[name][chosen[name] || 0];
    const config = { responsive: true, displayModeBar: false };
    Plotly.react(document.getElementById(name), paint(data, style), paint(merge(base, layout), style), config);
  };
  const drawAll = () => Object.keys(figures).forEach(draw);
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  for (const select of document.querySelectorAll("select[data-figure]"))
    select.addEventListener("change", () => {
      chosen[select.dataset.figure] = select.selectedIndex;
      draw(select.dataset.figure);
    });
  document.documentElement.dataset.drawn = Object.keys(figures).length;
})();
"""
