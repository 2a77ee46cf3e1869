'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const canvas = document.getElementById('timeline'), tip = document.getElementById('tip');
const pen = canvas.getContext('2d');
const LEFT = 72, RIGHT = 16, TOP = 22, ROW = data.ranks <= 16 ? 28 : data.ranks <= 32 ? 22 : 17;
const FONT = ROW > 20 ? 12 : 11, UNIT = data.unit ? ' ' + data.unit : '';
const HEIGHT = TOP + ROW * data.ranks + 8;

const rows = Array.from({length: data.ranks}, () => []);
data.events.forEach((event, index) => rows[event[0]].push(index));
const needs = data.events.map(() => []), neededBy = data.events.map(() => []);
for (const [producer, consumer] of data.needs) {
  needs[consumer].push(producer);
  neededBy[producer].push(consumer);
}

let from = 0, until = data.length || 1, hovered = -1, width = 0;

const scale = () => (width - LEFT - RIGHT) / (until - from);
const x = time => LEFT + (time - from) * scale();
const y = rank => TOP + rank * ROW;

function name(event) {
  const texts = event[3].map(([kind, stage, number]) => kind + stage + '.' + number);
  return texts.length > 1 ? 'FB(' + texts.join(',') + ')' : texts[0];
}

function drawEvent(index, alpha, least) {
  const [rank, start, end, parts] = data.events[index];
  const left = Math.max(x(start), LEFT), right = Math.min(x(end), width - RIGHT);
  if (right < LEFT || left > width - RIGHT) return;
  const wide = Math.max(right - left, least), gap = wide > 3 ? 0.5 : 0, high = (ROW - 2) / parts.length;
  pen.globalAlpha = alpha;
  parts.forEach(([kind, , number, variant], at) => {
    pen.fillStyle = data.fills[kind][variant];
    pen.fillRect(left, y(rank) + 1 + at * high, wide - gap, high - (parts.length > 1 ? 0.5 : 0));
    const size = Math.min(FONT, high - 1);
    if (size >= 7 && wide > String(number).length * size * 0.62 + 3) {
      pen.font = size + "px 'DejaVu Sans', Verdana, sans-serif";
      pen.fillStyle = data.inks[kind][variant];
      pen.fillText(number, left + wide / 2, y(rank) + 1 + (at + 0.5) * high);
    }
  });
  pen.globalAlpha = 1;
}

function frame(index, colour) {
  const [rank, start, end] = data.events[index];
  const left = Math.max(x(start), LEFT), right = Math.min(x(end), width - RIGHT);
  if (right < LEFT || left > width - RIGHT) return;
  pen.strokeStyle = colour;
  pen.lineWidth = 2.5;
  pen.strokeRect(left, y(rank) + 1, Math.max(right - left, 2), ROW - 2);
}

function arrow(producer, consumer, colour) {
  const [a, , end] = data.events[producer], [b, start] = data.events[consumer];
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, TOP, width - LEFT - RIGHT, HEIGHT - TOP);
  pen.clip();
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x(end), y(a) + ROW / 2);
  pen.lineTo(x(start), y(b) + ROW / 2);
  pen.stroke();
  pen.restore();
}

function step(length, most) {
  const raw = length / most, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(factor => factor * power).find(size => size >= raw * (1 - 1e-9));
}

function axis() {
  const size = step(until - from, Math.max(2, (width - LEFT) / 90));
  pen.font = "11px 'DejaVu Sans', Verdana, sans-serif";
  for (let number = Math.ceil(from / size); number * size <= until; number++) {
    pen.fillStyle = '#ddd';
    pen.fillRect(x(number * size), TOP - 4, 1, HEIGHT - TOP);
    pen.fillStyle = '#333';
    pen.fillText(Number((number * size).toPrecision(8)) + UNIT, x(number * size), 9);
  }
}

/* The first event of a row that ends after `time`: rows are in order. */
function firstAfter(row, time) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.events[row[middle]][2] > time) high = middle; else low = middle + 1;
  }
  return low;
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  width = document.documentElement.clientWidth;
  canvas.style.width = width + 'px';
  canvas.style.height = HEIGHT + 'px';
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.textBaseline = 'middle';
  pen.textAlign = 'center';
  for (let rank = 0; rank < data.ranks; rank++) {
    pen.fillStyle = rank % 2 ? '#f1f1f1' : '#f7f7f7';
    pen.fillRect(LEFT, y(rank), width - LEFT - RIGHT, ROW);
    pen.fillStyle = '#333';
    pen.font = FONT + "px 'DejaVu Sans', Verdana, sans-serif";
    pen.textAlign = 'right';
    pen.fillText('rank ' + rank, LEFT - 8, y(rank) + ROW / 2);
    pen.textAlign = 'center';
  }
  axis();
  const box = document.getElementById('critical');
  const path = box && box.checked ? new Set(data.critical) : null;
  const near = new Set(hovered < 0 ? [] : [hovered, ...needs[hovered], ...neededBy[hovered]]);
  const chosen = hovered >= 0 ? near : path;
  rows.forEach(row => {
    for (let at = firstAfter(row, from); at < row.length && data.events[row[at]][1] < until; at++) {
      if (!chosen || !chosen.has(row[at])) drawEvent(row[at], chosen ? 0.22 : 1, 0.5);
    }
  });
  if (chosen) chosen.forEach(index => drawEvent(index, 1, 2));
  if (hovered >= 0) {
    needs[hovered].forEach(other => { arrow(other, hovered, '#0044cc'); frame(other, '#0044cc'); });
    neededBy[hovered].forEach(other => { arrow(hovered, other, '#cc0022'); frame(other, '#cc0022'); });
    frame(hovered, '#000');
  }
}

function find(left, top) {
  const rank = Math.floor((top - TOP) / ROW);
  if (rank < 0 || rank >= data.ranks || left < LEFT || left > width - RIGHT) return -1;
  const time = from + (left - LEFT) / scale(), slack = 1 / scale();
  const row = rows[rank], at = firstAfter(row, time - slack);
  return at < row.length && data.events[row[at]][1] <= time + slack ? row[at] : -1;
}

function show(event, left, top) {
  const [rank, start, end, parts] = event;
  const number = value => Number(value.toPrecision(7)) + UNIT;
  tip.textContent = [
    name(event) + '  on rank ' + rank,
    ...parts.map(([kind, stage, micro]) => kind + ': stage ' + stage + ', micro-batch ' + micro),
    'start ' + number(start) + '   end ' + number(end) + '   takes ' + number(end - start),
  ].join('\n');
  tip.style.display = 'block';
  tip.style.left = Math.min(left + 14, width - tip.offsetWidth - 8) + 'px';
  tip.style.top = (top + 18 + tip.offsetHeight > window.innerHeight ? top - tip.offsetHeight - 10 : top + 18) + 'px';
}

function zoom(factor, centre) {
  const length = Math.min(Math.max((until - from) * factor, data.length / 1e5), data.length || 1);
  from = centre - (centre - from) * length / (until - from);
  from = Math.min(Math.max(from, 0), (data.length || 1) - length);
  until = from + length;
  draw();
}

let drag = null;
canvas.addEventListener('mousemove', pointer => {
  if (drag) {
    const length = until - from;
    const start = drag.from - (pointer.offsetX - drag.x) / scale();
    from = Math.min(Math.max(start, 0), (data.length || 1) - length);
    until = from + length;
    tip.style.display = 'none';
    draw();
    return;
  }
  const found = find(pointer.offsetX, pointer.offsetY);
  if (found !== hovered) {
    hovered = found;
    draw();
  }
  if (found < 0) tip.style.display = 'none';
  else show(data.events[found], pointer.clientX, pointer.clientY);
});
canvas.addEventListener('mouseleave', () => { hovered = -1; tip.style.display = 'none'; draw(); });
canvas.addEventListener('mousedown', pointer => { drag = {x: pointer.offsetX, from}; });
window.addEventListener('mouseup', () => { drag = null; });
canvas.addEventListener('dblclick', () => { from = 0; until = data.length || 1; draw(); });
canvas.addEventListener('wheel', pointer => {
  if (!pointer.ctrlKey && !pointer.metaKey) return;  // scrolls the page: 64 ranks are higher than a screen
  pointer.preventDefault();
  zoom(pointer.deltaY > 0 ? 1.25 : 0.8, from + (pointer.offsetX - LEFT) / scale());
}, {passive: false});
document.getElementById('in').onclick = () => zoom(0.5, (from + until) / 2);
document.getElementById('out').onclick = () => zoom(2, (from + until) / 2);
document.getElementById('all').onclick = () => { from = 0; until = data.length || 1; draw(); };
if (document.getElementById('critical')) document.getElementById('critical').onchange = draw;
window.addEventListener('resize', draw);
draw();
