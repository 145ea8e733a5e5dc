// Helpers that create DOM elements. Text is inserted as text, never parsed as HTML.

export const find = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Set an element's text only if it differs: setting the same text would trigger a new layout. */
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export function icon(name) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  const use = document.createElementNS(namespace, "use");
  use.setAttribute("href", `page/icons.svg#${name}`);
  svg.append(use);
  svg.setAttribute("aria-hidden", "true");
  return svg;
}

export function iconButton(name, label, onclick) {
  const button = make("button", { type: "button", className: "quiet", title: label, onclick }, icon(name));
  button.setAttribute("aria-label", label);
  return button;
}

export function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    await copy(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text });  // navigator.clipboard needs HTTPS or localhost
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
