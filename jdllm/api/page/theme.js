// A classic script at the top of the page: a module runs too late, and the other theme would flash.
"use strict";

(() => {
  const STORED = "jdllm-theme";
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function stored() {
    try {
      return localStorage.getItem(STORED);
    } catch {
      return null;
    }
  }

  function store(theme) {
    try {
      if (theme === null) localStorage.removeItem(STORED);
      else localStorage.setItem(STORED, theme);
    } catch {
      // Where nothing can be stored, the choice lasts as long as the page.
    }
  }

  function systemTheme() {
    return system.matches ? "dark" : "light";
  }

  function currentTheme() {
    return root.dataset.theme ?? systemTheme();
  }

  function choose(theme) {
    const asSystem = theme === systemTheme();
    if (asSystem) delete root.dataset.theme;
    else root.dataset.theme = theme;
    store(asSystem ? null : theme);
  }

  const before = stored();
  if (before === "dark" || before === "light") root.dataset.theme = before;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", String(currentTheme() === "dark"));
    button.addEventListener("click", () => {
      choose(currentTheme() === "dark" ? "light" : "dark");
      show();
    });
    system.addEventListener("change", show);
    show();
  });
})();
