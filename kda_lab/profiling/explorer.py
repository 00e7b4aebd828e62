"""A timeline to zoom into: a slider for the interval, the picture, and its finding as text."""

from __future__ import annotations

import html

import ipywidgets

from kda_lab.profiling import figures
from kda_lab.profiling.timeline import Timeline
from kda_lab.show import image, png


def timeline_explorer(timeline: Timeline, title: str = "") -> TimelineExplorer:
    """The zoomable form of `figures.timeline_figure`."""
    return TimelineExplorer(timeline, title)


class TimelineExplorer(ipywidgets.VBox):
    """Public: `interval`, the slider of (start, end) in microseconds, `zooms`, the buttons that set it (everything, or
    the first launch of a kernel), and the HTML widgets `picture` and `status`."""

    def __init__(self, timeline: Timeline, title: str = "") -> None:
        self._timeline, self._title = timeline, title
        end = max(timeline.duration_us, 1e-3)
        self.interval = ipywidgets.FloatRangeSlider(
            value=(0.0, end),
            min=0.0,
            max=end,
            step=end / 1000,
            description="µs",
            continuous_update=False,
            readout_format=".0f",
            layout={"width": "60em", "max_width": "100%"},
        )
        self.zooms = [self._zoom_button("everything", 0.0, end)]
        for name in dict.fromkeys(span.name for span in timeline.of("kernel")):
            first = next(span for span in timeline.of("kernel") if span.name == name)
            margin = 0.1 * first.duration_us
            self.zooms.append(self._zoom_button(name, first.start_us - margin, first.end_us + margin))
        self.picture, self.status = ipywidgets.HTML(), ipywidgets.HTML()
        self.interval.observe(lambda _: self.redraw(), names="value")
        buttons = ipywidgets.HBox(self.zooms, layout={"flex_flow": "row wrap"})
        super().__init__([buttons, self.interval, self.picture, self.status])
        self.redraw()

    def redraw(self) -> None:
        """Draw the interval that the slider shows."""
        start, end = self.interval.value
        if end <= start:
            return
        fig = figures.timeline_figure(self._timeline, start, end, self._title)
        self.picture.value = image(png(fig), fig.alt)
        self.status.value = f'<div role="status" aria-live="polite">{html.escape(fig.alt)}</div>'

    def _zoom_button(self, name: str, start_us: float, end_us: float) -> ipywidgets.Button:
        button = ipywidgets.Button(description=name, tooltip=f"show {start_us:.0f} to {end_us:.0f} µs")

        def zoom(_: ipywidgets.Button) -> None:
            self.interval.value = (max(start_us, self.interval.min), min(end_us, self.interval.max))

        button.on_click(zoom)
        return button
