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
