// Tooltips that explain the element that is under the pointer, has the focus or was tapped.

import { find } from "./elements.js";

const DELAY_MS = 250;

export function startTips() {
  const tip = find("tip");
  let timer = 0;
  let owner = null;

  const hide = () => {
    clearTimeout(timer);
    owner?.removeAttribute("aria-describedby");
    owner = null;
    tip.hidden = true;
  };
  const show = (element) => {
    if (element === owner) return;
    hide();
    owner = element;
    timer = setTimeout(() => {
      if (!element.isConnected) return;
      tip.textContent = element.tip?.() ?? element.dataset.tip; // `tip()` computes text that changes
      tip.hidden = false;
      element.setAttribute("aria-describedby", "tip");
      place(tip, element);
    }, DELAY_MS);
  };
  const about = (event) => event.target.closest?.("[data-tip]");
  const follow = (event) => (about(event) ? show(about(event)) : hide());
  document.addEventListener("pointerover", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("focusin", follow);
  document.addEventListener("focusout", hide);
  // Focusing an element may also scroll, but before its tip is shown.
  document.addEventListener("scroll", (event) => !tip.hidden && event.target.contains(owner) && hide(), true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

/** Place a tip beside the engine's panel, or else above or below its element; for a heading, its whole section. */
function place(tip, element) {
  const box = (element.closest("h2")?.parentElement ?? element).getBoundingClientRect();
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const beside = (element.closest("#engine")?.getBoundingClientRect().left ?? 0) - width - 8;
  let left = Math.min(box.left, window.innerWidth - width - 8);
  let top = box.top - height - 8;
  if (beside >= 8) [left, top] = [beside, Math.min(box.top, window.innerHeight - height - 8)];
  else if (top < 8 || element.closest("#legend")) top = box.bottom + 8; // the legend is below its map
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, Math.min(top, window.innerHeight - height - 8))}px`;
}
