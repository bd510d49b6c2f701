// Other runs beside the one that is shown: curves over time or samples, and their figures so far, or final ones.

const WATCHED_MS = 2000, IDLE_MS = 10000;

export function comparePanel({ $, element, table, number, percent, bytes, seconds, plot, state, uPlot, mark, LINES }) {
  const chosen = new Set();
  let found = { choices: [], runs: [] }, key = "", timer = 0;
  const shownRun = () => state.picture?.run ?? "";
  const color = (run) => LINES[Math.max(0, found.runs.indexOf(run)) % LINES.length];

  async function ask() {
    clearTimeout(timer);
    timer = setTimeout(ask, chosen.size ? WATCHED_MS : IDLE_MS);
    if (document.hidden || state.search || !state.picture) return;
    const names = [shownRun(), ...[...chosen].filter((name) => name !== shownRun())];
    try {
      const answer = await fetch(`/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
      if (!answer.ok) return;
      found = await answer.json();
      found.runs.sort((a, b) => names.indexOf(a.run) - names.indexOf(b.run));
      mark("compare");
    } catch { /* the page says in its head that nobody serves it */ }
  }

  function drawChoices() {
    const others = found.choices.filter((name) => name !== shownRun()), now = [shownRun(), ...others].join("\n");
    if (now === key) return;
    key = now;
    $("compare-choices").replaceChildren(...others.map((name) => {
      const label = element("label"), box = element("input");
      box.type = "checkbox"; box.value = name; box.checked = chosen.has(name);
      box.addEventListener("change", () => { if (box.checked) chosen.add(name); else chosen.delete(name); ask(); });
      label.append(box, ` ${name}`);
      return label;
    }));
    $("compare-note").textContent = others.length ? "Choose up to six other runs." : "There is no other run in this folder.";
  }

  function drawCurves(id, of, isShare) {
    const place = $(id), runs = found.runs.filter((run) => run[of].length), x = $("compare-axis").value === "samples" ? 1 : 0;
    place.parentElement.hidden = !runs.length || !chosen.size;
    if (place.parentElement.hidden) return;
    const value = (_, v) => (isShare ? percent(v, 2) : number(v));
    const series = runs.map((run) => ({
      label: run.run, stroke: color(run), width: 1.5, spanGaps: true, points: { show: isShare || run[of].length < 3, size: 5 }, value,
    }));
    const columns = runs.map((run) => {
      const points = new Map(run[of].map((point) => [point[x], point[2]]));  // uPlot wants each x once
      return [[...points.keys()], [...points.values()]];
    });
    plot(id, series, uPlot.join(columns), false, {}, x ? "samples" : "seconds in steps");
  }

  function nameOf(run) {
    const cell = element("span"), mark = element("i", "", "swatch");
    mark.style.background = color(run);
    cell.append(mark, ` ${run.run}`);
    return cell;
  }

  function drawCompare() {
    drawChoices();
    drawCurves("compare-loss-plot", "losses", false);
    drawCurves("compare-accuracy-plot", "accuracies", true);
    const first = found.runs[0];
    $("compare-axis").parentElement.hidden = !chosen.size;
    $("compare-table").replaceChildren(...(first && chosen.size ? [table([
      ["run folder", nameOf], ["task", (r) => r.task], ["state", (r) => r.phase],
      ["nodes", (r) => r.num_nodes, "number"], ["training time", (r) => seconds(r.seconds), "number"],
      ["samples", (r) => r.samples.toLocaleString("en"), "number"],
      ["samples/s", (r) => number(r.samples_per_second), "number"],
      ["speed-up", (r) => (first.samples_per_second ? (r.samples_per_second / first.samples_per_second).toFixed(2) : "–"), "number"],
      ["of the ideal", (r) => percent(r.ideal), "number"], ["sent", (r) => bytes(r.sent_bytes), "number"],
      ["loss", (r) => number(r.loss), "number"], ["accuracy", (r) => percent(r.accuracy, 2), "number"],
    ], found.runs)] : []));
  }

  $("compare-axis").addEventListener("change", () => mark("compare"));
  return { panels: { compare: drawCompare }, ask };
}
