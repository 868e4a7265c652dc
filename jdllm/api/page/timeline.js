// What the server said of itself in the last minute, as values and rates over time.

const KEPT_SECONDS = 60;
const KINDS = ["full", "refresh", "reuse", "adaptive"];

export class Timeline {
  constructor() {
    this.samples = [];
    this.last = null;
  }

  // Take in what GET /v1/stats answers; `now` in seconds. A server that started anew begins a new one.
  take(stats, now) {
    if (this.last !== null && stats.uptime < this.last.stats.uptime) this.samples = [];
    else if (this.last !== null) this.samples.push(sample(this.last, { stats, now }));
    this.samples = this.samples.filter((one) => now - one.now <= KEPT_SECONDS);
    this.last = { stats, now };
  }

  // Points of a series: [seconds ago, value].
  points(name, now) {
    return this.samples.map((one) => [now - one.now, one[name]]);
  }

  values(name) {
    return this.samples.map((one) => one[name]);
  }
}

// What is now, and rates a second between two answers, by the server's own clock.
function sample(before, { stats, now }) {
  const seconds = Math.max(stats.uptime - before.stats.uptime, 1e-3);
  const rate = (count) => (count(stats) - count(before.stats)) / seconds;
  const rates = KINDS.map((kind) => [`${kind}Rows`, rate((one) => one.rows[kind])]);
  return {
    now,
    waiting: stats.waiting,
    running: stats.running,
    pages: stats.pages - stats.free_pages,
    tokens: rate((one) => one.tokens),
    evaluations: rate((one) => one.evaluated),
    ...Object.fromEntries(rates),
  };
}
