// The scrubber over the steps of a run: a slider, a button that plays, and a bar for what each step committed.

const SVG = "http://www.w3.org/2000/svg";
// Bars are no wider than if there were so many.
const WIDEST_OF = 32;
const PLAY_SECONDS = { shortest: 1.5, longest: 8, step: 0.15 };

export class Player {
  // `elements`: { slider, button, bars, label }; `onFrame` is called with the frame to draw.
  constructor(elements, onFrame) {
    Object.assign(this, elements);
    this.onFrame = onFrame;
    this.run = null;
    this.timer = null;
    this.slider.addEventListener("input", () => {
      this.pause();
      this.go(this.slider.valueAsNumber);
    });
    this.button.addEventListener("click", () => (this.timer === null ? this.play() : this.pause()));
  }

  // Take the steps of a run that is over; stays at its end.
  load(run) {
    this.run = run;
    this.slider.max = run.frames;
    this.drawBars();
    this.enable(run.frames > 0);
    this.go(run.frames);
  }

  unload() {
    this.pause();
    this.run = null;
    this.enable(false);
    this.bars.replaceChildren();
    this.label.textContent = "";
  }

  enable(enabled) {
    this.slider.disabled = this.button.disabled = !enabled;
  }

  go(frame) {
    this.slider.value = frame;
    const text = frame === 0 ? `before step 1 of ${this.run.frames}` : `step ${frame} of ${this.run.frames}`;
    this.label.textContent = text;
    this.slider.setAttribute("aria-valuetext", `${text}, ${this.run.total(frame)} tokens committed`);
    [...this.bars.children].forEach((bar, i) => bar.classList.toggle("done", i < frame));
    this.onFrame(frame);
  }

  play() {
    const { shortest, longest, step } = PLAY_SECONDS;
    const seconds = Math.min(Math.max(this.run.frames * step, shortest), longest);
    const from = this.slider.valueAsNumber % this.run.frames;
    const began = performance.now();
    const tick = (now) => {
      const frame = from + Math.floor(((now - began) / 1000 / seconds) * this.run.frames);
      this.go(Math.max(from, Math.min(frame, this.run.frames)));
      if (frame >= this.run.frames) this.pause();
      else this.timer = requestAnimationFrame(tick);
    };
    this.showPlaying(true);
    this.timer = requestAnimationFrame(tick);
  }

  pause() {
    cancelAnimationFrame(this.timer);
    this.timer = null;
    this.showPlaying(false);
  }

  showPlaying(playing) {
    this.button.setAttribute("aria-label", playing ? "Pause" : "Play the steps");
    this.button.dataset.playing = playing;
  }

  drawBars() {
    const counts = this.run.steps.map((step) => step.committed);
    const most = Math.max(1, ...counts);
    this.bars.setAttribute("viewBox", `0 0 ${Math.max(counts.length, 1)} 1`);
    const width = Math.min(0.8, counts.length / WIDEST_OF);
    this.bars.replaceChildren(...counts.map((count, i) => bar(i, width, count / most)));
  }
}

// A bar ends where the slider's thumb is in the same step.
function bar(index, width, height) {
  const rect = document.createElementNS(SVG, "rect");
  const place = { x: index + 1 - width, y: 1 - height, width, height };
  for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
  return rect;
}
