// Tabs of a `tablist`, with the keys that one expects of them.

const MOVES = { ArrowLeft: -1, ArrowRight: 1 };

export class Tabs {
  // `list`: the `tablist`; each tab has its panel's id in aria-controls, and its name in data-mode.
  constructor(list, onChange) {
    this.tabs = [...list.querySelectorAll("[role=tab]")];
    this.onChange = onChange;
    for (const tab of this.tabs) tab.addEventListener("click", () => this.choose(tab.dataset.mode));
    list.addEventListener("keydown", (event) => this.move(event));
  }

  get mode() {
    return this.tabs.find((tab) => tab.ariaSelected === "true").dataset.mode;
  }

  choose(mode) {
    if (!this.tabs.some((tab) => tab.dataset.mode === mode)) return;
    for (const tab of this.tabs) {
      const chosen = tab.dataset.mode === mode;
      tab.ariaSelected = String(chosen);
      tab.tabIndex = chosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !chosen;
    }
    this.onChange(mode);
  }

  move(event) {
    const last = this.tabs.length - 1;
    const at = this.tabs.indexOf(document.activeElement);
    const to = { Home: 0, End: last }[event.key] ?? at + (MOVES[event.key] ?? NaN);
    const tab = this.tabs[to > last ? 0 : to < 0 ? last : to];
    if (tab === undefined) return;
    event.preventDefault();
    this.choose(tab.dataset.mode);
    tab.focus();
  }
}
