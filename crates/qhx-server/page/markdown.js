// Markdown to nodes. Nothing is ever parsed as HTML: every text becomes a text node, and of links only http, https and mailto lead anywhere.
"use strict";

const Markdown = (() => {
  const SAFE = /^(https?:\/\/|mailto:)/i;

  function inline(text, parent) {
    // Code first: nothing inside of it means anything.
    const pattern = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^*]+?)\*\*|\*([^*\s][^*]*?)\*|\[([^\]]*)\]\(([^()\s]+)\)/g;
    let last = 0;
    for (const found of text.matchAll(pattern)) {
      parent.append(text.slice(last, found.index));
      last = found.index + found[0].length;
      const [, ticks, code, strong, emphasis, label, target] = found;
      if (ticks) {
        const node = document.createElement("code");
        node.textContent = code.trim();
        parent.append(node);
      } else if (strong !== undefined) {
        inline(strong, parent.appendChild(document.createElement("strong")));
      } else if (emphasis !== undefined) {
        inline(emphasis, parent.appendChild(document.createElement("em")));
      } else if (SAFE.test(target)) {
        const link = document.createElement("a");
        link.href = target;
        link.rel = "noopener noreferrer nofollow";
        link.target = "_blank";
        inline(label, link);
        parent.append(link);
      } else {
        parent.append(found[0]);
      }
    }
    parent.append(text.slice(last));
  }

  function codeBlock(lines, language) {
    const block = document.createElement("pre");
    const code = block.appendChild(document.createElement("code"));
    if (language) code.dataset.language = language;
    code.textContent = lines.join("\n");
    return block;
  }

  function table(rows) {
    const cells = (row) => row.trim().replace(/^\||\|$/g, "").split("|");
    const node = document.createElement("table");
    rows.filter((_, number) => number !== 1).forEach((row, number) => {
      const line = node.insertRow();
      for (const cell of cells(row)) {
        const place = document.createElement(number === 0 ? "th" : "td");
        inline(cell.trim(), place);
        line.append(place);
      }
    });
    return node;
  }

  function list(lines) {
    const ordered = /^\s*\d+[.)]\s/.test(lines[0]);
    const node = document.createElement(ordered ? "ol" : "ul");
    for (const line of lines) {
      const item = line.match(/^\s*(?:[-*+]|\d+[.)])\s+(.*)$/);
      if (item) inline(item[1], node.appendChild(document.createElement("li")));
      else if (node.lastChild) inline(" " + line.trim(), node.lastChild);
    }
    return node;
  }

  // The nodes of a text.
  function render(text) {
    const out = document.createDocumentFragment();
    const lines = text.split("\n");
    for (let at = 0; at < lines.length; ) {
      const line = lines[at];
      const fence = line.match(/^\s*(```+|~~~+)\s*([\w+-]*)\s*$/);
      if (fence) {
        const body = [];
        for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) body.push(lines[at]);
        at++;
        out.append(codeBlock(body, fence[2]));
        continue;
      }
      const heading = line.match(/^(#{1,6})\s+(.*)$/);
      if (heading) {
        inline(heading[2], out.appendChild(document.createElement("h" + Math.min(heading[1].length + 3, 6))));
        at++;
      } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
        out.append(document.createElement("hr"));
        at++;
      } else if (/^\s*>/.test(line)) {
        const quoted = [];
        for (; at < lines.length && /^\s*>/.test(lines[at]); at++) quoted.push(lines[at].replace(/^\s*> ?/, ""));
        out.appendChild(document.createElement("blockquote")).append(render(quoted.join("\n")));
      } else if (/^\s*([-*+]|\d+[.)])\s/.test(line)) {
        const items = [];
        for (; at < lines.length && lines[at].trim() && (/^\s*([-*+]|\d+[.)])\s/.test(lines[at]) || /^\s+/.test(lines[at])); at++) items.push(lines[at]);
        out.append(list(items));
      } else if (line.includes("|") && /^[\s|:-]+$/.test(lines[at + 1] || "") && (lines[at + 1] || "").includes("-")) {
        const rows = [];
        for (; at < lines.length && lines[at].includes("|"); at++) rows.push(lines[at]);
        out.append(table(rows));
      } else if (line.trim()) {
        const words = [lines[at]];
        for (at++; at < lines.length && lines[at].trim() && !/^\s*(```|~~~|#{1,6}\s|>|[-*+]\s)/.test(lines[at]); at++) words.push(lines[at]);
        inline(words.join("\n"), out.appendChild(document.createElement("p")));
      } else {
        at++;
      }
    }
    return out;
  }

  return { render };
})();
