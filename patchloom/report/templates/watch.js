"use strict";
// Load the page of `patchloom watch` again, unless somebody reads it.
const pause = document.getElementById("pause");
let timer;

function setPaused(paused) {
  clearTimeout(timer);
  if (!paused) timer = setTimeout(() => location.reload(), 1000 * pause.dataset.seconds);
  pause.setAttribute("aria-pressed", String(paused));
}

pause.addEventListener("click", () => setPaused(pause.getAttribute("aria-pressed") !== "true"));
pause.hidden = false;
setPaused(false);
