// What is wider than the page scrolls, with the keyboard, too.
for (const element of document.querySelectorAll("article :is(pre, .output, .table-wrapper, div.math)")) {
  if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
}
