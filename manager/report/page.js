"use strict";
(() => {
  const byId = (id) => document.getElementById(id);

  // A slider to walk through the saves: by mouse over the chart, by arrow keys, by screen reader.
  const picker = byId("picker");
  if (picker) {
    const texts = JSON.parse(byId("save-texts").textContent);
    const pick = byId("pick");
    const picked = byId("picked");
    const chart = byId("chart-secs");
    const columns = chart.querySelectorAll("g");
    let shown = null;
    const show = () => {
      const index = Number(pick.value);
      picked.textContent = texts[index];
      pick.setAttribute("aria-valuetext", texts[index]);
      if (shown) shown.classList.remove("on");
      shown = columns[index];
      if (shown) shown.classList.add("on");
    };
    pick.addEventListener("input", show);
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const index = Math.floor(((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width);
      if (index >= 0 && index < columns.length) {
        pick.value = String(index);
        show();
      }
    });
    picker.hidden = false;
    show();
  }

  // A filter for the table of steps.
  const finder = byId("finder");
  if (finder) {
    const find = byId("find");
    const rows = [...finder.nextElementSibling.querySelectorAll("tbody tr")];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    find.addEventListener("input", () => {
      const wanted = find.value.trim().toLowerCase();
      let count = 0;
      rows.forEach((row, index) => {
        row.hidden = wanted !== "" && !texts[index].includes(wanted);
        count += row.hidden ? 0 : 1;
      });
      byId("found").textContent = wanted === "" ? "" : `${count} of ${rows.length}`;
    });
    finder.hidden = false;
  }
})();
