// A sentence of explanation where the pointer rests, the focus is, or a finger taps.

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
      tip.textContent = element.tip?.() ?? element.dataset.tip; // made now, where it changes
      tip.hidden = false;
      element.setAttribute("aria-describedby", "tip");
      place(tip, element.getBoundingClientRect());
    }, DELAY_MS);
  };
  const about = (event) => event.target.closest?.("[data-tip]");
  const follow = (event) => (about(event) ? show(about(event)) : hide());
  document.addEventListener("pointerover", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("focusin", follow);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

/** Below the element, or above it where there is no room; never outside the window. */
function place(tip, box) {
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = Math.max(8, Math.min(box.left, window.innerWidth - width - 8));
  const below = box.bottom + 8;
  const top = below + height > window.innerHeight ? box.top - height - 8 : below;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}
