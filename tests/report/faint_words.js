(() => {
  const parsed = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = ([red, green, blue]) =>
    0.2126 * linear(red / 255) + 0.7152 * linear(green / 255) + 0.0722 * linear(blue / 255);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parsed(getComputedStyle(at).backgroundColor);
      if ((colour[3] ?? 1) > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasWords = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasWords || !element.checkVisibility() || ["SCRIPT", "STYLE", "OPTION"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const ink = light(parsed(element instanceof SVGElement ? style.fill : style.color));
    const paper = light(ground(element));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < 4.5) faint.push(`${element.tagName} ${element.textContent.slice(0, 20)}: ${contrast.toFixed(2)}`);
  }
  return faint;
})();
