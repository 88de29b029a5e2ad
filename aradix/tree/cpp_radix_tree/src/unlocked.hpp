// Work that lets other threads of the interpreter run.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace aradix {

// The interpreter's lock is let go of for as long as this lives. A thread that wants it back while the interpreter ends is
// unwound by some of them, which no destructor and none of nanobind's functions lets through: that would abort the
// process. So it waits for the end of the process instead, as newer interpreters have it do.
class Unlocked {
public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;)
                std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
    Unlocked(const Unlocked &) = delete;
    Unlocked &operator=(const Unlocked &) = delete;

private:
    PyThreadState *state_;
};

}  // namespace aradix
