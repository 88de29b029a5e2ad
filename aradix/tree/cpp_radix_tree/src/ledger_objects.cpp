// What a ledger shows to Python: its events, and to the collector what it refers to.
#include "ledger.hpp"

namespace aradix {

nb::object Ledger::take_events() {
    Step step(*this);
    std::vector<Event> events;
    events.swap(events_);
    nb::list taken;
    for (const Event &event : events) {
        if (const auto *stored = std::get_if<Stored>(&event)) {
            append_to(taken, records_.block_stored(stored->hashes, stored->parent, stored->tokens,
                                                   integer(static_cast<int64_t>(page_size_)), stored->name_space));
        } else if (const auto *removed = std::get_if<Removed>(&event)) {
            append_to(taken, records_.block_removed(removed->hashes));
        } else {
            append_to(taken, records_.all_blocks_cleared());
        }
    }
    return taken;
}

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
