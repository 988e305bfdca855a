"use strict";

const figures = document.getElementById("figures").textContent;

function draw() {
  const style = getComputedStyle(document.documentElement);
  const themed = (key, value) =>
    typeof value === "string" ? value.replace(/^var\((--\w+)\)$/, (_, name) => style.getPropertyValue(name).trim()) : value;
  for (const [name, figure] of Object.entries(JSON.parse(figures, themed))) {
    // A finger on a chart scrolls the page.
    figure.layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
    Plotly.react(name, figure.data, figure.layout, { responsive: true, displayModeBar: false });
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

function selectText(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    selectText(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      document.execCommand("copy"); // pages served without TLS have no clipboard
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}
