// What happens when the page is open: tables, charts, and the switch between light and dark.

function themeSwitch() {
  const switched = document.getElementById("theme");
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => (switched.textContent = isDark() ? "Light" : "Dark");
  switched.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();
}

themeSwitch();
document.querySelectorAll("div.table").forEach((root) => new SortableTable(root));
document.querySelectorAll("div.charts").forEach((root) => new Charts(root));
document.querySelectorAll("div.gantt").forEach((root) => new GanttChart(root));
document.documentElement.dataset.ready = "yes";
