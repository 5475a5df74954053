// The texts with too little contrast: below 4.5 to 1, or below 3 to 1 for large text (WCAG 2.2, 1.4.3).
(() => {
  const paper = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {
    paper.clearRect(0, 0, 1, 1); paper.fillStyle = colour; paper.fillRect(0, 0, 1, 1);
    return [...paper.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = channels(colour).map((c) => c / 255).map((c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const under = (element) => {
    if (element.tagName === "text" && element.parentNode.querySelector(":scope > rect")) {
      return getComputedStyle(element.parentNode.querySelector(":scope > rect")).fill;
    }
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (channels(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const faint = [];
  let looked = 0;
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest(".hidden, script, style, noscript, title, .skip") || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const ink = element.tagName === "text" ? style.fill : style.color;
    const [a, b] = [light(ink), light(under(element))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const isLarge = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    looked += 1;
    if (ratio < (isLarge ? 3 : 4.5)) faint.push(`${element.tagName} ${element.className} ${ratio.toFixed(2)}`);
  }
  return looked > 50 ? faint : [`only ${looked} texts`];
})()
