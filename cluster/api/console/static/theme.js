// Before anything is drawn: the theme that was chosen here, else the system's.
(() => {
  let theme = "";
  try {
    theme = localStorage.getItem("kvrelay-theme") || "";
  } catch {
    // Storage may be turned off: the system's theme it is.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
