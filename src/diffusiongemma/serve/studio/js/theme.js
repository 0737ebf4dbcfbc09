// Before anything is painted, so that no page flashes in the other theme: the one that was chosen, or the system's.
"use strict";
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const read = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // storage is switched off
    }
  };
  const apply = () => {
    document.documentElement.dataset.theme = read() ?? (system.matches ? "dark" : "light");
    document.dispatchEvent(new CustomEvent("themechange"));
  };
  system.addEventListener("change", apply);
  apply();

  // The other theme; chosen for good only where it is not the system's own.
  window.toggleTheme = () => {
    const wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      if (wanted === (system.matches ? "dark" : "light")) localStorage.removeItem("theme");
      else localStorage.setItem("theme", wanted);
      apply();
    } catch {
      document.documentElement.dataset.theme = wanted;
      document.dispatchEvent(new CustomEvent("themechange"));
    }
  };
})();
