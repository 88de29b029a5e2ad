#include "copy_line.hpp"

#include "python_records.hpp"

#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL ARADIX_ARRAY_API
#define NO_IMPORT_ARRAY
#include <numpy/arrayobject.h>

namespace aradix {
namespace {

// From here on a batch goes past the caches. It is written a third faster, and leaves them to those who compute; whoever
// reads it from memory then loses half of that. Of smaller pieces too much is lost at their ends.
constexpr size_t kLeastStreamed = size_t{256} << 10, kLeastPiece = 2048;

PyArrayObject *pages_array(const nb::object &object) {
    if (!PyArray_Check(object.ptr()) || PyArray_NDIM(reinterpret_cast<PyArrayObject *>(object.ptr())) < 2)
        throw nb::type_error("pages must be arrays of at least two dimensions, the first of them pages");
    return reinterpret_cast<PyArrayObject *>(object.ptr());
}

// As memcpy, past the caches.
void copy_streaming(char *target, const char *source, size_t size) {
#if defined(__SSE2__)
    size_t head = (16 - reinterpret_cast<uintptr_t>(target) % 16) % 16;
    std::memcpy(target, source, head);
    size_t done = head;
    for (; done + 64 <= size; done += 64) {
        const auto *from = reinterpret_cast<const __m128i *>(source + done);
        auto *to = reinterpret_cast<__m128i *>(target + done);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    std::memcpy(target + done, source + done, size - done);
#else
    std::memcpy(target, source, size);
#endif
}

// The pages that slots stand for, all of them from 1 to `last`; None where they are no whole pages.
nb::object page_ids(nb::handle slots, int64_t page_size, int64_t last) {
    if (!PyArray_Check(slots.ptr()) || page_size < 1)
        return nb::none();
    auto *array = reinterpret_cast<PyArrayObject *>(slots.ptr());
    if (PyArray_TYPE(array) != NPY_INT64 || PyArray_NDIM(array) != 1 || !PyArray_ISCARRAY_RO(array) ||
        PyArray_SIZE(array) % page_size != 0)
        return nb::none();
    const auto *items = static_cast<const int64_t *>(PyArray_DATA(array));
    nb::list pages;
    for (int64_t begin = 0; begin < PyArray_SIZE(array); begin += page_size) {
        int64_t first = items[begin];
        if (first < page_size || first % page_size != 0 || first / page_size > last)
            return nb::none();
        for (int64_t offset = 1; offset < page_size; ++offset)
            if (items[begin + offset] != first + offset)
                return nb::none();
        append_to(pages, integer(first / page_size));
    }
    return pages;
}

void append_pages(std::vector<int64_t> &out, nb::handle pages, int64_t num_pages) {
    for (nb::handle item : pages) {
        int64_t page = nb::cast<int64_t>(item);
        if (page < 0 || page >= num_pages)
            throw nb::index_error("no such page");
        out.push_back(page);
    }
}

}  // namespace

// ---- PageViews ----

PageViews::PageViews(nb::object source, nb::object target)
    : source_array_(std::move(source)), target_array_(std::move(target)) {
    PyArrayObject *from = pages_array(source_array_), *to = pages_array(target_array_);
    int last = PyArray_NDIM(from) - 1;
    bool fits = PyArray_NDIM(to) == last + 1 && PyArray_ITEMSIZE(from) == PyArray_ITEMSIZE(to) && PyArray_ISWRITEABLE(to);
    for (int dim = 1; fits && dim <= last; ++dim)
        fits = PyArray_DIM(from, dim) == PyArray_DIM(to, dim) && PyArray_DIM(from, dim) > 0;
    if (!fits)
        throw nb::value_error("pages must have one shape, and targets be writable");
    const npy_intp item_bytes = PyArray_ITEMSIZE(from);
    bool in_one_piece = PyArray_STRIDE(from, last) == item_bytes && PyArray_STRIDE(to, last) == item_bytes;
    source_ = static_cast<const char *>(PyArray_DATA(from));
    target_ = static_cast<char *>(PyArray_DATA(to));
    num_source_pages = PyArray_DIM(from, 0);
    num_target_pages = PyArray_DIM(to, 0);
    source_stride_ = PyArray_STRIDE(from, 0);
    target_stride_ = PyArray_STRIDE(to, 0);
    piece_bytes_ = static_cast<size_t>(in_one_piece ? PyArray_DIM(from, last) * item_bytes : item_bytes);
    pieces_.push_back({0, 0});
    for (int dim = 1; dim < (in_one_piece ? last : last + 1); ++dim) {
        std::vector<Piece> outer;
        outer.swap(pieces_);
        for (const Piece &piece : outer)
            for (int64_t index = 0; index < PyArray_DIM(from, dim); ++index)
                pieces_.push_back({piece.source + index * PyArray_STRIDE(from, dim),
                                   piece.target + index * PyArray_STRIDE(to, dim)});
    }
}

void PageViews::copy(const std::vector<int64_t> &pages) const {
    size_t page_bytes = piece_bytes_ * pieces_.size();
    if (piece_bytes_ < kLeastPiece || pages.size() / 2 * page_bytes < kLeastStreamed) {
        copy_pieces(pages, [](char *target, const char *source, size_t size) { std::memcpy(target, source, size); });
        return;
    }
    copy_pieces(pages, copy_streaming);
#if defined(__SSE2__)
    _mm_sfence();  // who sees what comes next sees this
#endif
}

template <class CopyPiece>
void PageViews::copy_pieces(const std::vector<int64_t> &pages, CopyPiece copy_piece) const {
    size_t num_pages = pages.size() / 2;
    for (size_t i = 0; i < num_pages; ++i) {
        const char *from = source_ + pages[i] * source_stride_;
        char *to = target_ + pages[num_pages + i] * target_stride_;
        for (const Piece &piece : pieces_)
            copy_piece(to + piece.target, from + piece.source, piece_bytes_);
    }
}

// ---- Marker ----

bool Marker::add(nb::object callback) {
    // Seen before it is announced: whoever is told of the marker needs the GIL to look.
    callbacks_.push_back(std::move(callback));
    int state = kOpen;
    if (state_.compare_exchange_strong(state, kAwaited, std::memory_order_acq_rel) || state == kAwaited)
        return true;
    callbacks_.pop_back();
    return false;
}

nb::list Marker::take() {
    std::vector<nb::object> taken;
    taken.swap(callbacks_);
    nb::list callbacks;
    for (const nb::object &callback : taken)
        callbacks.append(callback);
    return callbacks;
}

int Marker::traverse(visitproc visit, void *arg) const {
    for (const nb::object &callback : callbacks_)
        Py_VISIT(callback.ptr());
    return 0;
}

// ---- CopyLine ----

CopyLine::~CopyLine() {
    for (Step &step : steps_)
        Py_DECREF(step.object);
    for (PyObject *marker : reached_)
        Py_DECREF(marker);
    for (PyObject *object : spent_)
        Py_DECREF(object);
}

void CopyLine::push(Step step) {
    std::vector<PyObject *> spent;
    {
        std::lock_guard lock(mutex_);
        steps_.push_back(std::move(step));
        spent.swap(spent_);
    }
    has_steps_.notify_one();
    for (PyObject *object : spent)
        Py_DECREF(object);
}

void CopyLine::put(nb::object step) {
    Kind kind = step.is_none() ? Kind::end : Kind::call;
    push({kind, step.release().ptr()});
}

void CopyLine::put_copy(nb::object views, nb::object source_pages, nb::object target_pages) {
    const auto &known = nb::cast<const PageViews &>(views);
    std::vector<int64_t> pages;
    append_pages(pages, source_pages, known.num_source_pages);
    size_t num_pages = pages.size();
    append_pages(pages, target_pages, known.num_target_pages);
    if (pages.size() != 2 * num_pages)
        throw nb::value_error("as many sources as targets");
    push({Kind::copy, views.release().ptr(), &known, nullptr, std::move(pages)});
}

void CopyLine::put_mark(nb::object marker) {
    auto &known = nb::cast<Marker &>(marker);
    push({Kind::mark, marker.release().ptr(), nullptr, &known});
}

PyObject *CopyLine::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        has_steps_.wait(lock, [this] { return !steps_.empty(); });
        Step step = std::move(steps_.front());
        steps_.pop_front();
        if (step.kind == Kind::end) {
            ended_ = true;
            has_reached_.notify_all();
        }
        if (step.kind == Kind::end || step.kind == Kind::call)
            return step.object;
        if (step.kind == Kind::copy) {
            lock.unlock();
            step.views->copy(step.pages);
            lock.lock();
            spent_.push_back(step.object);
        } else if (step.marker->reach()) {
            reached_.push_back(step.object);
            has_reached_.notify_one();
        } else {
            spent_.push_back(step.object);
        }
    }
}

PyObject *CopyLine::next_reached() {
    std::unique_lock lock(mutex_);
    has_reached_.wait(lock, [this] { return !reached_.empty() || ended_; });
    if (reached_.empty())
        return nullptr;
    PyObject *marker = reached_.front();
    reached_.pop_front();
    return marker;
}

// ---- what blocks ----
//
// Plain functions of the interpreter, not nanobind's: a thread that wants the GIL back while the interpreter ends is
// unwound through its frames, and nanobind's let nothing through.

namespace {

CopyLine *line_of(PyObject *object) {
    if (!nb::isinstance<CopyLine>(object)) {
        PyErr_SetString(PyExc_TypeError, "a CopyLine is expected");
        return nullptr;
    }
    return nb::inst_ptr<CopyLine>(object);
}

PyObject *run_line(PyObject *, PyObject *object) {
    CopyLine *line = line_of(object);
    if (line == nullptr)
        return nullptr;
    PyObject *step;
    Py_BEGIN_ALLOW_THREADS
    step = line->run();
    Py_END_ALLOW_THREADS
    return step;
}

PyObject *next_reached(PyObject *, PyObject *object) {
    CopyLine *line = line_of(object);
    if (line == nullptr)
        return nullptr;
    PyObject *marker;
    Py_BEGIN_ALLOW_THREADS
    marker = line->next_reached();
    Py_END_ALLOW_THREADS
    return marker == nullptr ? Py_NewRef(Py_None) : marker;
}

PyMethodDef functions[] = {{"run_line", run_line, METH_O, nullptr},
                           {"next_reached", next_reached, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

int traverse_marker(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Marker>(self)->traverse(visit, arg) : 0;
}

int clear_marker(PyObject *self) {
    if (nb::inst_ready(self))
        nb::inst_ptr<Marker>(self)->clear();
    return 0;
}

PyType_Slot marker_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(traverse_marker)},
                              {Py_tp_clear, reinterpret_cast<void *>(clear_marker)},
                              {0, nullptr}};

}  // namespace

void add_copy_line(nb::module_ &module) {
    using namespace nb::literals;
    module.def("page_ids", &page_ids, "slots"_a, "page_size"_a, "last"_a);
    nb::class_<PageViews>(module, "PageViews")
        .def(nb::init<nb::object, nb::object>(), "source"_a, "target"_a);
    nb::class_<Marker>(module, "Marker", nb::type_slots(marker_slots))
        .def(nb::init<>())
        .def("done", &Marker::done)
        .def("add", &Marker::add, "callback"_a)
        .def("take", &Marker::take);
    nb::class_<CopyLine>(module, "CopyLine")
        .def(nb::init<>())
        .def("put", &CopyLine::put, "step"_a.none())
        .def("put_copy", &CopyLine::put_copy, "views"_a, "source_pages"_a, "target_pages"_a)
        .def("put_mark", &CopyLine::put_mark, "marker"_a);
    if (PyModule_AddFunctions(module.ptr(), functions) != 0)
        throw nb::python_error();
}

}  // namespace aradix
