// A small line chart of the last minute, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 130;
const LEFT = 44;
const TOP = 8;
const BOTTOM = 18;
const SECONDS = 60;

export class Chart {
  // `series`: [{ name, title }], at most four; each has its own colour and dashes.
  constructor(title, series) {
    this.series = series;
    this.figure = document.createElement("figure");
    this.figure.className = "card chart";
    const caption = document.createElement("figcaption");
    caption.append(heading(title), ...series.map(key));
    this.values = [...caption.querySelectorAll("[data-value]")];
    this.svg = made("svg", { class: "plot", "aria-hidden": "true" });
    this.figure.append(caption, this.svg);
  }

  // Draw points of each series, [seconds ago, value]; `capacity` is shown beside the value.
  draw(points, capacity = null) {
    const highest = Math.max(0, ...points.flat().map(([, value]) => value));
    const top = rounded(highest);
    const width = this.svg.clientWidth;
    const x = (ago) => width - ((width - LEFT) * ago) / SECONDS;
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    this.svg.replaceChildren(
      ...[0, top / 2, top].flatMap((value) => gridLine(y(value), value, width)),
      label("60 s ago", LEFT, HEIGHT - 4, "start"),
      label("now", width, HEIGHT - 4, "end"),
      ...points.map((one, i) =>
        line(
          one.map(([ago, value]) => [x(ago), y(value)]),
          i,
        ),
      ),
    );
    points.forEach((one, i) => {
      const now = one.length === 0 ? "–" : short(one.at(-1)[1]);
      this.values[i].textContent = capacity === null ? now : `${now} of ${short(capacity)}`;
    });
  }
}

export function short(value) {
  if (value >= 1e6) return `${Number((value / 1e6).toFixed(1))} M`;
  if (value >= 1e4) return `${Number((value / 1e3).toFixed(1))} k`;
  return value >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes === 0) return `${Math.floor(seconds)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// The next of 1, 2 and 4 times a power of ten, but at least 2, so that the middle is a whole number.
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return Math.max(
    2,
    [1, 2, 4, 10].map((factor) => factor * power).find((step) => step >= value),
  );
}

function gridLine(y, value, width) {
  const line = made("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y });
  return [line, label(short(value), LEFT - 6, y + 4, "end")];
}

function line(points, index) {
  const path = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  return made("polyline", { class: `line series-${index}`, points: path });
}

function label(text, x, y, anchor) {
  const element = made("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

function heading(text) {
  const element = document.createElement("h2");
  element.textContent = text;
  return element;
}

function key({ title }, index) {
  const element = document.createElement("span");
  element.className = "key";
  const swatch = made("svg", { viewBox: "0 0 22 4", class: "swatch", "aria-hidden": "true" });
  swatch.append(made("line", { class: `line series-${index}`, x1: 0, x2: 22, y1: 2, y2: 2 }));
  const value = document.createElement("b");
  value.dataset.value = "";
  element.append(swatch, `${title} `, value);
  return element;
}

function made(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  return element;
}
