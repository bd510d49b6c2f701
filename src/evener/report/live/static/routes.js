// The picture of who sends what to whom: a box for every node, an arrow for every route.

const BOX = { width: 112, height: 40 }, MOST_NODES = 24, MOST_ON_ELLIPSE = 4, ROW = 64, BEND = 9, ARROW = 6;
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
export const nameOf = (name) => name || "master";

function places(names, hasMaster, width) {
  // nodes in a circle, clockwise: up to four on an ellipse, more in two columns; a master in its middle
  const x = width / 2, across = (width - BOX.width) / 2 - 4, num = names.length, isEllipse = num <= MOST_ON_ELLIPSE;
  const rows = Math.ceil(num / 2), tall = Math.max(hasMaster ? 140 : 80, ((rows - 1) * ROW) / 2);
  const isAlone = num === 1 && !hasMaster, height = (isAlone ? 0 : 2 * tall) + BOX.height + 8, found = new Map();
  names.forEach((name, i) => {
    const turn = (2 * Math.PI * i) / num - Math.PI / 2, row = i < rows ? i : num - 1 - i, y = -tall + (2 * tall * row) / Math.max(1, rows - 1);
    if (isAlone) found.set(name, [x, height / 2]);
    else if (isEllipse) found.set(name, [x + across * Math.cos(turn), height / 2 + tall * Math.sin(turn)]);
    else found.set(name, [i < rows ? x + across : x - across, height / 2 + y]);
  });
  if (hasMaster) found.set("", [x, height / 2]);
  return { found, height };
}

function arrow([x1, y1], [x2, y2], isBent, color) {
  const long = Math.hypot(x2 - x1, y2 - y1) || 1, across = [-(y2 - y1) / long, (x2 - x1) / long], bend = isBent ? BEND : 0;
  const way = [(x2 - x1) / long, (y2 - y1) / long];
  const tip = [(x1 + x2) / 2 + bend * across[0] + ARROW * way[0], (y1 + y2) / 2 + bend * across[1] + ARROW * way[1]];
  const control = [(x1 + x2) / 2 + 2 * bend * across[0], (y1 + y2) / 2 + 2 * bend * across[1]];
  const corner = (side) => [0, 1].map((k) => (tip[k] - 2 * ARROW * way[k] + side * ARROW * across[k]).toFixed(1)).join(",");
  return [
    svg("path", { d: `M${x1} ${y1} Q${control.join(" ")} ${x2} ${y2}`, stroke: color, class: "route" }),
    svg("polygon", { points: `${tip.map((k) => k.toFixed(1)).join(",")} ${corner(1)} ${corner(-1)}`, fill: color }),
  ];
}

function box(name, [x, y], node, mood, words) {
  const made = svg("g", { class: `node ${mood} ${node && !words.takesPart ? "absent" : ""}` });
  if (node?.reason) made.append(svg("title", {}, node.reason));
  made.append(
    svg("rect", { x: x - BOX.width / 2, y: y - BOX.height / 2, width: BOX.width, height: BOX.height, rx: 6 }),
    svg("text", { x, y: y - 4, class: "name" }, short(nameOf(name), 16)), svg("text", { x, y: y + 12 }, short(words.text, 19)),
  );
  return made;
}

export function routePanel({ $, element, bytes, seconds, state, moodOf, LINES }) {
  const kind = (route) => JSON.stringify([route.content, route.delay_seconds, route.bytes_per_second]);
  const measured = (route) => (route.bytes_per_second === null ? "not measured before the run"
    : `measured before the run: ${bytes(route.bytes_per_second)}/s, delay ${seconds(route.delay_seconds)}`);

  function legend(kinds, routes) {
    return kinds.map((key, i) => {
      const line = element("span"), mark = element("i", "", "swatch"), route = routes.find((one) => kind(one) === key);
      mark.style.background = LINES[i % LINES.length];
      line.append(mark, ` ${route.content}: ${measured(route)}`);
      return line;
    });
  }

  return function drawRoutes() {
    const { nodes, routes } = state.picture, place = $("route-picture"), note = $("route-note");
    const hasMaster = routes.some((route) => !route.source || !route.target), kinds = [...new Set(routes.map(kind))];
    note.replaceChildren(...legend(kinds, routes));
    if (nodes.length > MOST_NODES) { place.replaceChildren(element("p", `The picture shows ${MOST_NODES} nodes at most; the table shows all.`, "note")); return; }
    if (!routes.length) note.textContent = "Nothing is exchanged.";
    const width = Math.min(640, place.clientWidth), { found, height } = places(nodes.map((node) => node.name), hasMaster, width);
    const pairs = new Set(routes.map((route) => `${route.source}\n${route.target}`)), takesPart = new Set(routes.flatMap((r) => [r.source, r.target]));
    const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    drawing.setAttribute("aria-label", routes.map((r) => `${nameOf(r.source)} sends ${r.content} to ${nameOf(r.target)}`).join("; ") || "nothing is exchanged");
    for (const route of routes) {
      const isBent = pairs.has(`${route.target}\n${route.source}`), color = LINES[kinds.indexOf(kind(route)) % LINES.length];
      drawing.append(...arrow(found.get(route.source), found.get(route.target), isBent, color));
    }
    for (const node of nodes) {
      const isIn = takesPart.has(node.name) || !node.state, sent = node.sent_per_second ? `sends ${bytes(node.sent_per_second)}/s` : node.device;
      drawing.append(box(node.name, found.get(node.name), node, moodOf(node), { text: node.state || sent, takesPart: isIn }));
    }
    if (hasMaster) drawing.append(box("", found.get(""), null, "", { text: "merges updates", takesPart: true }));
    place.replaceChildren(drawing);
  };
}
