// What the server said of itself in the last minute, as values and rates over time.

const KEPT_SECONDS = 60;
const KINDS = ["full", "refresh", "reuse", "adaptive"];
const MILLISECONDS = 1000;
const PERCENT = 100;

export class Timeline {
  constructor() {
    this.samples = [];
    this.last = null;
  }

  // Take in what GET /v1/stats answers; `now` in seconds. A server that started anew begins a new one.
  take(stats, now) {
    this.samples = this.samples.filter((one) => now - one.now <= KEPT_SECONDS);
    if (this.last !== null && stats.uptime < this.last.stats.uptime) this.samples = [];
    else if (this.last !== null) {
      const oldest = this.samples[0]?.stats ?? this.last.stats;
      this.samples.push(sample(this.last.stats, stats, oldest, now));
    }
    this.last = { stats, now };
  }

  // Points of a series: [seconds ago, value]; none where there was nothing to measure.
  points(name, now) {
    return this.samples.filter((one) => one[name] !== null).map((one) => [now - one.now, one[name]]);
  }

  values(name) {
    return this.samples.map((one) => one[name]).filter((value) => value !== null);
  }
}

// What is now, rates a second between two answers, by the server's own clock, and times since `oldest`.
function sample(before, stats, oldest, now) {
  const seconds = Math.max(stats.uptime - before.uptime, 1e-3);
  const rate = (count) => (count(stats) - count(before)) / seconds;
  const rates = KINDS.map((kind) => [`${kind}Rows`, rate((one) => one.rows[kind])]);
  const share = (part, whole, factor = 1) => {
    const [some, all] = [rate(part), rate(whole)];
    return all > 0 ? (factor * some) / all : null;
  };
  const rows = (one) => sum(one.rows) + sum(one.padding);
  const ended = within(oldest, stats);
  return {
    now,
    stats,
    waiting: stats.waiting,
    running: stats.running,
    pages: stats.pages - stats.free_pages,
    tokens: rate((one) => one.tokens),
    evaluations: rate((one) => one.evaluated),
    busy: PERCENT * rate((one) => sum(one.busy)),
    padding: share((one) => sum(one.padding), rows, PERCENT),
    served: share((one) => sum(one.served), (one) => one.evaluated),
    refreshWait: share((one) => one.waited.refresh, (one) => one.served.refresh, MILLISECONDS),
    answered: rate(answered),
    errors: rate(errors),
    median: quantile(ended, 0.5),
    slow: quantile(ended, 0.95),
    ...Object.fromEntries(rates),
  };
}

function sum(counts) {
  return Object.values(counts).reduce((all, count) => all + count, 0);
}

function answered({ http }) {
  return http.statuses[200] ?? 0;
}

// Requests over HTTP that ended with an error.
export function errors({ http }) {
  const counts = Object.entries(http.statuses).filter(([status]) => status >= 400);
  return counts.reduce((sum, [, count]) => sum + count, 0);
}

// How many requests were answered between two answers, within how many seconds.
function within(before, after) {
  return after.http.within.map(([most, count], i) => [most, count - before.http.within[i][1]]);
}

// Milliseconds within which this share of the requests was answered: as Prometheus does, they are taken to lie
// evenly between two bounds. Null where there were none.
function quantile(counts, share) {
  const rank = share * counts.at(-1)[1];
  if (rank === 0) return null;
  let [low, below] = [0, 0];
  for (const [most, count] of counts) {
    if (most === null) break;
    if (count >= rank) return MILLISECONDS * (low + ((most - low) * (rank - below)) / (count - below));
    [low, below] = [most, count];
  }
  return MILLISECONDS * low;
}
