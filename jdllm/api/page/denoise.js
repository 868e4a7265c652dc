// One run: what every position of its result held after every step. Knows nothing of how it is drawn.

export const GIVEN = "given";
export const MASK = "mask";
export const PROVISIONAL = "provisional";
export const COMMITTED = "committed";

const FIRST = { state: MASK, text: "", confidence: null, frame: 0 };

// `start` is the server's event of that name; times are seconds.
export class Denoising {
  constructor(start, now) {
    this.start = start.start;
    this.blocks = start.blocks;
    this.seed = start.seed;
    this.began = now;
    this.steps = [];
    this.end = null;
    this.histories = start.texts.slice(start.start, start.stop).map(firstHistory);
  }

  get length() {
    return this.histories.length;
  }

  get masks() {
    return this.histories.filter(([first]) => first.state === MASK).length;
  }

  // Frame 0 is before the first step, frame k after step k.
  get frames() {
    return this.steps.length;
  }

  // The step that committed a position, counted from 1; null where none has.
  committedIn(index) {
    const last = this.histories[index].at(-1);
    return last.state === COMMITTED ? last.frame : null;
  }

  // What a position holds in a frame: { state, text, confidence, frame }, `frame` being when that was chosen.
  at(index, frame) {
    const history = this.histories[index];
    let last = history.length - 1;
    while (history[last].frame > frame) last -= 1;
    return history[last];
  }

  take(step, now) {
    const frame = this.steps.length + 1;
    let committed = 0;
    step.positions.forEach((position, i) => {
      const history = this.histories[position - this.start];
      if (history === undefined || history.at(-1).state === GIVEN) return;
      const state = step.committed[i] ? COMMITTED : PROVISIONAL;
      // Editing commits a position again: another token, but not one more.
      if (state === COMMITTED && history.at(-1).state !== COMMITTED) committed += 1;
      history.push({ state, text: step.texts[i], confidence: step.confidence[i], frame });
    });
    this.steps.push({ committed, total: this.total(this.frames) + committed, at: now - this.began });
  }

  finish(end) {
    this.end = end;
  }

  // Tokens committed by the end of a frame.
  total(frame) {
    return frame === 0 ? 0 : this.steps[frame - 1].total;
  }

  // Seconds that a run had taken by the end of a frame.
  seconds(frame) {
    return frame === 0 ? 0 : this.steps[frame - 1].at;
  }
}

function firstHistory(text) {
  return [text === null ? FIRST : { ...FIRST, state: GIVEN, text }];
}
