// The page of figures: asks the server once a second how it is doing.

import { getJson } from "./api.js";
import { Chart, duration, short } from "./chart.js";
import { RequestTable } from "./requests.js";
import { Timeline, errors } from "./timeline.js";

const INTERVAL = 1000;
const UNAUTHORIZED = 401;
const CHARTS = [
  {
    title: "Requests",
    series: [
      { name: "running", title: "running" },
      { name: "waiting", title: "waiting" },
    ],
  },
  {
    title: "KV pool, pages in use",
    series: [{ name: "pages", title: "pages" }],
    capacity: (stats) => stats.pages,
  },
  {
    title: "Rows a second",
    series: [
      { name: "fullRows", title: "full" },
      { name: "refreshRows", title: "refresh" },
      { name: "reuseRows", title: "reuse" },
      { name: "adaptiveRows", title: "adaptive" },
    ],
  },
  { title: "Tokens a second", series: [{ name: "tokens", title: "committed" }] },
  {
    title: "Latency of the last minute, milliseconds",
    series: [
      { name: "median", title: "median, about" },
      { name: "slow", title: "95 % within, about" },
    ],
  },
  {
    title: "Answers over HTTP a second",
    series: [
      { name: "answered", title: "successes" },
      { name: "errors", title: "errors" },
    ],
  },
];
const RATES = {
  "Requests running": "running",
  "Requests waiting": "waiting",
  "Pages in use": "pages",
  "Rows a second, full": "fullRows",
  "Rows a second, refresh": "refreshRows",
  "Rows a second, reuse": "reuseRows",
  "Rows a second, adaptive": "adaptiveRows",
  "Device busy, %": "busy",
  "Rows of padding, %": "padding",
  "Requests in an evaluation": "served",
  "Wait for a refresh, ms": "refreshWait",
  "Tokens a second": "tokens",
  "Forward evaluations a second": "evaluations",
  "Latency, median, ms": "median",
  "Latency, 95 % within, ms": "slow",
  "HTTP errors a second": "errors",
};
const TOTALS = {
  "Requests finished": (stats) => stats.finished,
  "Requests failed": (stats) => stats.failed,
  "Requests aborted": (stats) => stats.aborted,
  "HTTP errors": errors,
  "Tokens committed": (stats) => stats.tokens,
  "Forward evaluations": (stats) => stats.evaluated,
  "Head rows": (stats) => stats.head_rows,
  "Pages of the KV pool": (stats) => stats.pages,
  "KV pool made again": (stats) => stats.rebuilt,
  "Executables compiled": (stats) => stats.compiled,
  "Executables loaded": (stats) => stats.loaded,
};

const element = (id) => document.getElementById(id);
const timeline = new Timeline();
const charts = CHARTS.map(({ title, series }) => new Chart(title, series));
const rates = rowsOf(element("rates"), Object.keys(RATES), 3);
const totals = rowsOf(element("totals"), [...Object.keys(TOTALS), "Uptime"], 1);
const requests = new RequestTable(element("requests").tBodies[0], element("no-requests"), showError);
element("charts").append(...charts.map((chart) => chart.figure));

// Rows of a table, one for each title; returns the cells behind the titles.
function rowsOf(table, titles, cells) {
  return titles.map((title) => {
    const row = table.tBodies[0].insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = title;
    row.append(head);
    return Array.from({ length: cells }, () => row.insertCell());
  });
}

function show(stats, now) {
  timeline.take(stats, now);
  charts.forEach((chart, i) => {
    const { series, capacity } = CHARTS[i];
    chart.draw(
      series.map(({ name }) => timeline.points(name, now)),
      capacity?.(stats),
    );
  });
  Object.values(RATES).forEach((name, i) => fill(rates[i], summary(timeline.values(name))));
  const counts = Object.values(TOTALS).map((count) => count(stats).toLocaleString("en"));
  [...counts, duration(stats.uptime)].forEach((text, i) => fill(totals[i], [text]));
  showStatuses(stats.http.statuses);
}

// How many requests over HTTP ended with each status.
function showStatuses(statuses) {
  const body = element("statuses").tBodies[0];
  const counts = Object.entries(statuses);
  body.replaceChildren();
  const cells = rowsOf(element("statuses"), counts.map(([status]) => status), 1);
  counts.forEach(([, count], i) => fill(cells[i], [count.toLocaleString("en")]));
}

function showError(error) {
  element("error").textContent = error.message;
}

function summary(values) {
  if (values.length === 0) return ["–", "–", "–"];
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return [values.at(-1), mean, Math.max(...values)].map(short);
}

function fill(cells, texts) {
  cells.forEach((cell, i) => {
    cell.textContent = texts[i];
  });
}

async function poll() {
  try {
    const [stats, { data }] = await Promise.all([getJson("v1/stats"), getJson("v1/requests")]);
    show(stats, performance.now() / 1000);
    requests.show(data, Date.now() / 1000);
    element("error").textContent = "";
  } catch (error) {
    showError(error);
    if (error.status === UNAUTHORIZED) return;
  }
  setTimeout(poll, INTERVAL);
}

async function showModel() {
  const [model] = (await getJson("v1/models")).data;
  element("model").textContent = `${model.id} · ${model.family}`;
}

showModel().catch(() => {});
poll();
