#include "recorded.hpp"

#include <pythread.h>

#include <optional>

#include "unlocked.hpp"

namespace aradix {
namespace {

nb::object digests_of(const PageSpans &pages) {
    nb::object packed = bytes_of(nullptr, pages.num_pages() * sizeof(Digest));
    pages.copy_digests(reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(packed.ptr())));
    return packed;
}

const PageSpans *pages_of(const Event &event) {
    if (const auto *stored = std::get_if<Stored>(&event))
        return &stored->pages;
    const auto *removed = std::get_if<Removed>(&event);
    return removed == nullptr ? nullptr : &removed->pages;
}

void hash_all(const EventLog &log) {
    for (const Event &event : log)
        if (const PageSpans *pages = pages_of(event))
            pages->hash();
}

int traverse_recorded(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<RecordedEvents>(self)->traverse(visit, arg) : 0;
}

int clear_recorded(PyObject *self) {
    if (nb::inst_ready(self))
        nb::inst_ptr<RecordedEvents>(self)->clear();
    return 0;
}

PyType_Slot recorded_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(traverse_recorded)},
                                {Py_tp_clear, reinterpret_cast<void *>(clear_recorded)},
                                {0, nullptr}};

}  // namespace

RecordedEvents::RecordedEvents(const Records &records, size_t page_size, size_t item_bytes,
                               std::shared_ptr<const EventLog> log)
    : stored_(records.block_stored), removed_(records.block_removed), cleared_(records.all_blocks_cleared),
      page_size_(page_size), item_bytes_(item_bytes), size_(log->size()), thread_(PyThread_get_thread_ident()),
      log_(std::move(log)) {}

nb::object RecordedEvents::list() {
    if (list_.is_valid())
        return list_;
    // Held here: another thread may be making the list as well, and be quicker.
    std::shared_ptr<const EventLog> log = log_;
    if (log == nullptr)
        return nb::list();  // cleared by the collector
    {
        std::optional<Unlocked> unlocked;
        if (PyThread_get_thread_ident() != thread_)
            unlocked.emplace();
        hash_all(*log);
    }
    nb::list made;
    for (const Event &event : *log)
        append_to(made, record(event));
    if (!list_.is_valid())
        list_ = made;
    log_.reset();
    return list_;
}

nb::object RecordedEvents::record(const Event &event) const {
    if (const auto *stored = std::get_if<Stored>(&event)) {
        const PageSpan &pages = stored->pages.spans().front();  // what is stored is in one span
        const Digest *before = pages.run->digest_before(pages.first);
        return stored_(digests_of(stored->pages), before == nullptr ? nb::none() : bytes_of(before->data(), before->size()),
                       event_tokens(pages.run->page(pages.first), pages.count * pages.run->page_bytes(), item_bytes_),
                       integer(static_cast<int64_t>(page_size_)), stored->name_space);
    }
    if (const auto *removed = std::get_if<Removed>(&event))
        return removed_(digests_of(removed->pages));
    return cleared_();
}

int RecordedEvents::traverse(visitproc visit, void *arg) {
    Py_VISIT(list_.ptr());
    if (log_ != nullptr)
        for (const Event &event : *log_)
            if (const auto *stored = std::get_if<Stored>(&event))
                Py_VISIT(stored->name_space.ptr());
    return 0;
}

void RecordedEvents::clear() {
    list_.reset();
    log_.reset();
}

void add_recorded_events(nb::module_ &module) {
    using Events = RecordedEvents;
    auto type = nb::class_<Events>(module, "RecordedEvents", nb::type_slots(recorded_slots))
                    .def("__len__", &Events::size)
                    .def("__iter__", [](Events &events) { return nb::iter(events.list()); })
                    .def("__repr__", [](Events &events) { return nb::repr(events.list()); });
    // All else that a sequence has, as the list has it.
    for (const char *name : {"__getitem__", "__contains__", "__reversed__", "index", "count"})
        type.attr(name) = nb::cpp_function(
            [name](Events &events, nb::args args) { return nb::object(events.list().attr(name)(*args)); },
            nb::name(name), nb::is_method(), nb::scope(type));
    nb::module_::import_("collections.abc").attr("Sequence").attr("register")(type);
}

}  // namespace aradix
