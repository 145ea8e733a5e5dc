// Parses Markdown into a tree of plain objects, and renders it as DOM nodes: text is never parsed as HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 20;
const MAX_INLINE = 4000; // characters; inline markup in longer paragraphs is not parsed
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

const node = (tag, children = [], attributes = {}) => ({ tag, children, attributes });

/** Parse Markdown into a list of nodes; a node is a string, or has a tag, attributes and children. */
export function parse(text) {
  return parseLines(text.replace(/\r\n?/g, "\n").split("\n"));
}

function parseLines(lines, depth = 0) {
  if (depth > MAX_DEPTH) return [node("p", [lines.join("\n")])];
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const parser = blockParsers.find(({ begins }) => begins(lines, at));
    const [made, next] = parser.read(lines, at, depth);
    if (made) nodes.push(made);
    at = next;
  }
  return nodes;
}

const blockParsers = [
  { begins: (lines, at) => lines[at].trim() === "", read: (_, at) => [null, at + 1] },
  { begins: (lines, at) => FENCE.test(lines[at]), read: readFence },
  { begins: (lines, at) => HEADING.test(lines[at]), read: readHeading },
  { begins: (lines, at) => RULE.test(lines[at]), read: (_, at) => [node("hr"), at + 1] },
  { begins: (lines, at) => /^ {0,3}>/.test(lines[at]), read: readQuote },
  { begins: (lines, at) => ITEM.test(lines[at]), read: readList },
  { begins: (lines, at) => isTable(lines, at), read: readTable },
  { begins: () => true, read: readParagraph },
];

function readFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  let last = at + 1;
  while (last < lines.length && !end.test(lines[last])) last += 1;
  const code = lines.slice(at + 1, last).join("\n");
  return [node("pre", [code], { language: language.trim().split(/\s/)[0] }), last + 1];
}

function readHeading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  return [node(`h${marks.length}`, inline(text)), at + 1];
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [node("blockquote", parseLines(inner, depth + 1)), end];
}

function readList(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) break;
    const body = [found[3] ?? ""];
    at += 1;
    while (at < lines.length && belongsToItem(lines, at, indent.length)) {
      body.push(lines[at].replace(new RegExp(`^\\s{0,${indent.length + found[2].length + 1}}`), ""));
      at += 1;
    }
    items.push(node("li", unwrapped(parseLines(body, depth + 1))));
  }
  const start = isOrdered ? { start: Number.parseInt(mark, 10) } : {};
  return [node(isOrdered ? "ol" : "ul", items, start), at];
}

function belongsToItem(lines, at, indent) {
  const deeper = /^\s*/.exec(lines[at])[0].length > indent;
  if (lines[at].trim() === "") {
    const next = lines[at + 1];
    return next !== undefined && next.trim() !== "" && /^\s*/.exec(next)[0].length > indent;
  }
  return deeper || (lines[at - 1].trim() !== "" && isPlain(lines, at));
}

const unwrapped = (nodes) =>
  nodes.length && nodes[0].tag === "p" ? [...nodes[0].children, ...nodes.slice(1)] : nodes;

const isTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1]);

function readTable(lines, at) {
  const head = node("tr", cells(lines[at]).map((cell) => node("th", inline(cell))));
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) {
    rows.push(node("tr", cells(lines[end]).map((cell) => node("td", inline(cell)))));
    end += 1;
  }
  return [node("table", [node("thead", [head]), node("tbody", rows)]), end];
}

const cells = (line) =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && isPlain(lines, end)) end += 1;
  return [node("p", inline(lines.slice(at, end).join("\n").trim())), end];
}

const isPlain = (lines, at) => blockParsers.slice(0, -1).every(({ begins }) => !begins(lines, at));

const INLINE = [
  { pattern: /\\([\\`*_{}[\]()#+\-.!|~<>])/, make: (found) => found[1] },
  { pattern: /(`+)(?!`)([\s\S]*?[^`])\1(?!`)/, make: (found) => node("code", [found[2].replace(/^ (.*) $/, "$1")]) },
  { pattern: /\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/, make: (found) => node("strong", inline(found[1])) },
  { pattern: /(?<!\w)__(?=\S)([\s\S]*?\S)__(?!\w)/, make: (found) => node("strong", inline(found[1])) },
  { pattern: /\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, make: (found) => node("em", inline(found[1])) },
  { pattern: /(?<!\w)_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, make: (found) => node("em", inline(found[1])) },
  { pattern: /~~(?=\S)([\s\S]*?\S)~~/, make: (found) => node("del", inline(found[1])) },
  { pattern: /!?\[([^\]]*)\]\(\s*<?([^\s)>]+)>?(?:\s+"[^"]*")?\s*\)/, make: (found) => link(found[2], inline(found[1]), found[0]) },
  { pattern: /https?:\/\/[^\s<>()[\]"'`]*[^\s<>()[\]"'`.,;:!?]/, make: (found) => link(found[0], [found[0]], found[0]) },
  { pattern: / {2,}\n/, make: () => node("br") },
];

/** Images become links too: model output must not load external resources. */
const link = (address, children, source) => (SAFE_LINK.test(address) ? node("a", children, { href: address }) : source);

function inline(text) {
  if (text.length > MAX_INLINE) return [text];
  const nodes = [];
  let rest = text;
  while (rest) {
    let first = null;
    for (const { pattern, make } of INLINE) {
      const found = pattern.exec(rest);
      if (found && (first === null || found.index < first.found.index)) first = { found, make };
    }
    if (first === null) break;
    if (first.found.index) nodes.push(rest.slice(0, first.found.index));
    nodes.push(first.make(first.found));
    rest = rest.slice(first.found.index + first.found[0].length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

/** Convert nodes to DOM nodes; `codeBlock(code, language)` creates the element of a fenced code block. */
export function render(nodes, codeBlock) {
  return nodes.map((each) => {
    if (typeof each === "string") return document.createTextNode(each);
    if (each.tag === "pre") return codeBlock(each.children[0], each.attributes.language);
    const element = document.createElement(each.tag);
    if (each.attributes.href) {
      Object.assign(element, { href: each.attributes.href, target: "_blank", rel: "noopener noreferrer" });
    }
    if (each.attributes.start > 1) element.start = each.attributes.start;
    element.append(...render(each.children, codeBlock));
    return element;
  });
}
