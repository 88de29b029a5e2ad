// What a ledger shows to Python: its events, and to the collector what it refers to.
#include "ledger.hpp"

#include <iterator>

namespace aradix {

// ---- events ----

void Ledger::record_stored(Handle handle) {
    Node &leaf = at(handle);
    Handle root = leaf.parent;
    while (at(root).parent != kNone)
        root = at(root).parent;
    leaf.pages = PageSpans(at(leaf.parent).pages, at(root).root->digest, leaf.tokens.data(), leaf.tokens.size(),
                           page_bytes_);
    record(Stored{leaf.pages, at(root).root->name_space});
}

void Ledger::record_removed(PageSpans pages) {
    if (!pages.empty())
        record(Removed{std::move(pages)});
}

void Ledger::record_cleared() {
    if (records_events_)
        record(Cleared{});
}

void Ledger::record(Event event) {
    events_.push_back(std::move(event));
    if (events_.size() != 1 || !on_event.is_valid())
        return;
    nb::object listener = on_event;
    nb::object told = nb::steal(PyObject_CallNoArgs(listener.ptr()));
    if (!told.is_valid())
        PyErr_WriteUnraisable(listener.ptr());  // the step goes on
}

nb::object Ledger::take_recorded() {
    Step step(*this);
    if (events_.empty())
        return records_.nothing;
    auto log = std::make_shared<const EventLog>(std::make_move_iterator(events_.begin()),
                                                std::make_move_iterator(events_.end()));
    events_.clear();
    return nb::cast(RecordedEvents(records_, page_size_, item_bytes_, std::move(log)));
}

nb::object Ledger::take_events() {
    nb::object recorded = take_recorded();
    return recorded.is(records_.nothing) ? nb::list() : nb::cast<RecordedEvents &>(recorded).list();
}

// ---- for the collector ----

int Ledger::traverse(visitproc visit, void *arg) {
    Py_VISIT(roots_.ptr());
    Py_VISIT(last_name_space_.ptr());
    Py_VISIT(on_event.ptr());
    if (int stop = ranking_.traverse(visit, arg))
        return stop;
    if (int stop = shares_.traverse(visit, arg))
        return stop;
    if (!marked_)
        return 0;
    int stop = 0;
    nodes_.for_each([&](Handle handle) {
        for (PyObject *mark : {at(handle).ready.ptr(), at(handle).streams.ptr()})
            if (stop == 0 && mark != nullptr)
                stop = visit(mark, arg);
    });
    return stop;
}

void Ledger::clear() {
    busy_ = true;  // nothing may come in any more
    ranking_.clear();
    shares_.clear();
    on_event.reset();
    nodes_.for_each([this](Handle handle) {
        nb::object ready = std::move(at(handle).ready);
        nb::object streams = std::move(at(handle).streams);
    });
}

}  // namespace aradix
