"""The course of a planned step: its peak is the plan's, and units do what the schedule says."""

from fullshard.planner import rehearse
from fullshard.planner.course import CourseRecorder
from support.planned import build


def test_the_fullest_moment_of_the_course_is_the_plans_peak():
    drawn, plain = rehearse(build, 0, 2, draws=True), rehearse(build, 0, 2)
    assert plain.course is None
    assert (drawn.parts, drawn.peaks) == (plain.parts, plain.peaks)
    course = drawn.course
    moments = list(zip(*course.parts.values(), strict=True))
    fullest = max(moments, key=sum)
    assert dict(zip(course.parts, fullest, strict=True)) == drawn.parts
    assert list(course.places) == sorted(course.places)
    assert 0 <= course.places[0] <= course.places[-1] <= course.operators
    assert max(course.places.count(place) for place in course.places) == 2


def test_every_unit_is_gathered_before_each_pass_and_reduced_after_the_last():
    course = rehearse(build, 0, 2, draws=True).course
    assert len(course.units) > 2
    for unit in course.units:
        own = [span for span in course.spans if span.unit == unit]
        assert [span.kind for span in own].count("reduce") == 1
        starts, ends = {}, {}
        for span in own:  # the modules of a unit have a forward each
            starts[span.kind] = min(span.start, starts.get(span.kind, span.start))
            ends[span.kind] = max(span.end, ends.get(span.kind, 0))
        assert starts["gather"] <= starts["forward"] < ends["forward"] <= starts["backward"] < starts["reduce"]
        assert ends["backward"] <= ends["reduce"]
    optimizer = next(span for span in course.spans if span.kind == "optimizer")
    assert optimizer.start == max(span.end for span in course.spans if span.unit)
    assert optimizer.end == course.operators > optimizer.start


def test_gradients_that_were_cleared_are_not_counted():
    course = rehearse(build, 0, 2, draws=True).course
    forwards = [span for span in course.spans if span.kind == "forward"]
    backward = min(span.start for span in course.spans if span.kind == "backward")
    held = dict(zip(course.places, course.parts["gradient_shards"], strict=True))
    first = min(span.start for span in forwards)
    assert {size for place, size in held.items() if first < place < backward} == {0}
    assert max(held.values()) > 0


def test_of_the_moments_of_one_operator_the_fullest_and_the_last_are_kept():
    recorder = CourseRecorder(iter([0, 1, 1, 1, 1, 2, 2]).__next__)
    for size in (5, 9, 7, 3, 4):
        recorder.sample_parts({"shards": size})
    course = recorder.course([])
    assert (course.places, course.parts["shards"]) == ((1, 1, 2), (9, 3, 4))
