// The panels of a search: what became of each trial, how its score went, and which options led where.

const MOST_LINES = 100, HEIGHT = 260, MARGIN = 44;

export function searchPanels({ $, element, table, number, percent, seconds, plot, state, uPlot }) {
  const isLarger = () => state.search.metric === "accuracy";
  const shown = (score) => (score === null ? "–" : isLarger() ? percent(score, 2) : number(score));
  const moodOf = (trial) => (trial.outcome === "failed" ? "bad" : trial.number === state.search.best ? "best" : "");
  const word = (trial) => trial.outcome ?? (trial.is_running ? "goes on" : trial.nodes.length ? "waits" : "begins");
  const short = (text) => (text === "" || /^-?\d+$/.test(text) || !Number.isFinite(Number(text)) ? text : number(Number(text)));
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function tiles() {
    const s = state.search, count = (name) => s.trials.filter((trial) => trial.outcome === name).length;
    const best = s.trials.find((trial) => trial.number === s.best);
    return [
      ["trials over", `${s.trials.filter((trial) => trial.outcome).length}`, `of ${Math.max(s.wanted, s.trials.length)}`],
      ["going on", `${s.trials.filter((trial) => trial.is_running).length}`, ""],
      ["pruned", `${count("pruned")}`, ""], ["failed", `${count("failed")}`, ""],
      ["since the start", seconds(s.seconds), ""],
      [`best ${s.metric}`, best ? shown(best.score) : "–", best ? `trial ${best.number}` : ""],
    ];
  }

  function drawTrials() {
    const s = state.search;
    $("run").textContent = state.picture.run;
    document.title = `${state.picture.run} – Evener`;
    const progress = $("progress");
    progress.value = s.trials.filter((trial) => trial.outcome).length / Math.max(1, s.wanted, s.trials.length);
    $("tiles").replaceChildren(...tiles().map(([name, value, more]) => {
      const tile = element("div"), words = element("dd", value);
      if (more) words.append(" ", element("small", more));
      tile.append(element("dt", name), words);
      return tile;
    }));
    const rows = s.trials.map((trial) => ({ ...trial, mood: moodOf(trial) })).reverse();
    $("trial-table").replaceChildren(rows.length ? table([
      ["trial", (t) => `${t.number}${t.number === s.best ? " ★" : ""}`, "number"], ["state", word],
      [s.metric, (t) => shown(t.score), "number"],
      ["epochs", (t) => `${Object.keys(t.scores).length} of ${s.epochs}`, "number"],
      ["node seconds", (t) => number(t.seconds), "number"], ["nodes", (t) => t.nodes.join(", ")],
      ["values", (t) => Object.entries(t.values).map(([name, value]) => `${name}=${short(value)}`).join(", "), "reason"],
      ["why", (t) => t.reason, "reason"],
    ], rows) : element("p", "No trial has begun yet.", "note"));
    const importances = Object.entries(s.importances).sort((a, b) => b[1] - a[1]);
    $("importance").textContent = importances.length
      ? `What the scores' differences come from: ${importances.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}.` : "";
  }

  function newest() {
    const s = state.search, best = s.trials.find((trial) => trial.number === s.best);
    const last = s.trials.slice(-MOST_LINES);
    return !best || last.includes(best) ? last : [best, ...last];
  }

  function drawScores() {
    const s = state.search, trials = newest().filter((trial) => Object.keys(trial.scores).length);
    if (!trials.length) return;
    const series = trials.map((trial) => ({
      label: `trial ${trial.number}`, width: trial.number === s.best ? 3 : 1,
      stroke: trial.number === s.best ? color("--good") : color("--compute"),
      dash: trial.outcome === "pruned" ? [4, 4] : undefined, spanGaps: true,
      points: { show: true, size: trial.number === s.best ? 6 : 4 }, value: (_, v) => (v === null || v === undefined ? "–" : shown(v)),
    }));
    const columns = trials.map((trial) => [Object.keys(trial.scores).map(Number), Object.values(trial.scores)]);
    plot("score-plot", series, uPlot.join(columns), false, {}, "epoch");
  }

  function axisOf(name, trials) {
    // where a value lies on its axis, from 0 at the bottom to 1, and the words at both ends
    const texts = trials.map((trial) => trial.values[name]).filter((text) => text !== undefined);
    const values = texts.map(Number);
    if (values.some((value) => !Number.isFinite(value))) {
      const choices = [...new Set(texts)].sort();
      const of = (text) => (choices.length > 1 ? choices.indexOf(text) / (choices.length - 1) : 0.5);
      return { name, at: (trial) => of(trial.values[name]), low: choices[0], high: choices.at(-1) };
    }
    return { name, ...scale(values, (trial) => Number(trial.values[name])), low: short(String(Math.min(...values))), high: short(String(Math.max(...values))) };
  }

  function scale(values, of) {
    const low = Math.min(...values), high = Math.max(...values), isLog = low > 0 && high / low >= 50;
    const bend = isLog ? Math.log : (value) => value, width = bend(high) - bend(low);
    return { at: (trial) => (width ? (bend(of(trial)) - bend(low)) / width : 0.5) };
  }

  function drawParallel() {
    const s = state.search, trials = newest().filter((trial) => trial.score !== null), canvas = $("parallel-canvas");
    if (!trials.length) return;
    const names = [...new Set(trials.flatMap((trial) => Object.keys(trial.values)))];
    const scores = trials.map((trial) => trial.score), axes = names.map((name) => axisOf(name, trials));
    axes.push({ name: s.metric, ...scale(scores, (trial) => trial.score), low: shown(Math.min(...scores)), high: shown(Math.max(...scores)) });
    const width = Math.max(300, canvas.parentElement.clientWidth, 90 * axes.length), ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = HEIGHT * ratio;
    canvas.style.width = `${width}px`; canvas.style.height = `${HEIGHT}px`;
    const pen = canvas.getContext("2d"), x = (i) => MARGIN + (i * (width - 2 * MARGIN)) / Math.max(1, axes.length - 1);
    const y = (share) => HEIGHT - 38 - share * (HEIGHT - 76);
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif"; pen.textAlign = "center";
    const ordered = [...trials].sort((a, b) => Number(a.number === s.best) - Number(b.number === s.best));
    for (const trial of ordered) {
      const isBest = trial.number === s.best;
      pen.strokeStyle = color(isBest ? "--good" : "--compute"); pen.lineWidth = isBest ? 3 : 1; pen.globalAlpha = isBest ? 1 : 0.45;
      pen.beginPath();
      axes.forEach((axis, i) => { const share = trial.values[axis.name] === undefined && i < names.length ? 0.5 : axis.at(trial); if (i) pen.lineTo(x(i), y(share)); else pen.moveTo(x(i), y(share)); });
      pen.stroke();
    }
    pen.globalAlpha = 1; pen.lineWidth = 1;
    axes.forEach((axis, i) => {
      pen.strokeStyle = color("--muted"); pen.fillStyle = color("--ink");
      pen.beginPath(); pen.moveTo(x(i), y(0)); pen.lineTo(x(i), y(1)); pen.stroke();
      pen.fillText(axis.name, x(i), 12, 120); pen.fillStyle = color("--muted");
      pen.fillText(axis.high, x(i), 28, 86); pen.fillText(axis.low, x(i), HEIGHT - 18, 86);
    });
    const best = s.trials.find((trial) => trial.number === s.best);
    canvas.setAttribute("aria-label", best ? `The best of ${trials.length} trials: ${Object.entries(best.values).map((pair) => pair.join(" ")).join(", ")}` : `${trials.length} trials, none of them complete`);
  }

  return { trials: drawTrials, scores: drawScores, parallel: drawParallel };
}
