// The images of the next message, which are pasted or dropped into the page.

import { find, make } from "./elements.js";

export class Images {
  constructor() {
    this.images = []; // names and data URLs
    this.list = find("images");
    document.addEventListener("paste", (event) => this.add(event, event.clipboardData));
    document.addEventListener("drop", (event) => this.add(event, event.dataTransfer));
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault(); // allows the drop
    });
  }

  async add(event, data) {
    const files = [...data.files].filter((file) => file.type.startsWith("image/"));
    if (files.length === 0) return;
    event.preventDefault();
    this.images.push(...(await Promise.all(files.map(read))));
    this.show();
  }

  /** Return the images, and start over without any. */
  take() {
    const taken = this.images;
    this.images = [];
    this.show();
    return taken;
  }

  show() {
    const remove = (image) => {
      this.images = this.images.filter((each) => each !== image);
      this.show();
    };
    const button = (image) => make("button", { type: "button", title: "Remove", onclick: () => remove(image) }, `${image.name} ×`);
    this.list.replaceChildren(...this.images.map(button));
    this.list.hidden = this.images.length === 0;
  }
}

/** Return the content of a message as the API expects it. Stored messages have only the names of images. */
export function contentWith(images, text) {
  const parts = images.map(({ name, url }) => (url ? { type: "image_url", image_url: { url } } : { type: "text", text: `[${name}]` }));
  return [...parts, { type: "text", text }];
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name || "image", url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
