#define _GNU_SOURCE
#include "streams.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum kind { COPY, FILL, RECORD, WAIT, KERNEL };

typedef struct Work {
    struct Work *newer, *older;
    enum kind kind;
    uint64_t number; /* in its stream, from 1 */
    char *dst;
    const char *src;
    size_t bytes;
    int value;
    Stream *other; /* WAIT: until this stream has done ... */
    uint64_t until;
    Event *event;
    char *before;  /* KERNEL: what dst held */
    char *content; /* COPY: of src, if it was read at once */
} Work;

struct Stream {
    Stream *next_stream;
    Work *oldest, *newest;     /* not done */
    Work *waiting;             /* the oldest that has not run */
    uint64_t issued, done;
    int queries;
};

struct Event {
    Stream *stream;
    uint64_t number;
    int queries;
    double ms;
};

enum { QUERIES = 3, LOOK_MS = 8, IDLE_LOOKS = 40, MOST_LAUNCHES = 1000, ILLEGAL_ADDRESS = 700 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams, *default_stream;
static unsigned long launches;
static int is_broken;
static pid_t launcher; /* the thread that launched last */
static enum { UNKNOWN, LATE, EARLY, RANDOM } order;
static unsigned seed;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void choose(const char *word) {
    if (!word || !strcmp(word, "late")) order = LATE;
    else if (!strcmp(word, "early")) order = EARLY;
    else if (sscanf(word, "random:%u", &seed) == 1) order = RANDOM;
    else { fprintf(stderr, "KVTIER_FAKE_ORDER=%s: late, early or random:SEED\n", word); abort(); }
}

static void hold(void) {
    pthread_mutex_lock(&lock);
    if (order == UNKNOWN) choose(getenv("KVTIER_FAKE_ORDER"));
}

static int is_early(void) { return order == EARLY || (order == RANDOM && rand_r(&seed) & 1); }

/* --- what a copy sees and changes --- */

static size_t overlap(const char *a, size_t a_bytes, const char *b, size_t b_bytes, const char **start) {
    const char *end = a + a_bytes < b + b_bytes ? a + a_bytes : b + b_bytes;
    *start = a > b ? a : b;
    return *start < end ? (size_t)(end - *start) : 0;
}

/* Read the bytes of src as they were before the kernels that another stream has not done. */
static void read_source(const Stream *own, Work *copy) {
    const char *start;
    char *content = copy->content = malloc(copy->bytes);
    memcpy(content, copy->src, copy->bytes);
    for (Stream *s = streams; s; s = s->next_stream)
        for (Work *k = s == own ? NULL : s->newest; k; k = k->older)
            if (k->kind == KERNEL) {
                size_t n = overlap(copy->src, copy->bytes, k->dst, k->bytes, &start);
                if (n) memcpy(content + (start - copy->src), k->before + (start - k->dst), n);
            }
}

/* Write to dst, but where such a kernel writes: it comes later, and what it found there was this content. */
static void write_unordered(const Stream *own, const Work *copy, const char *content) {
    const char *start;
    char *is_lost = NULL;
    for (Stream *s = streams; s; s = s->next_stream)
        for (Work *k = s == own ? NULL : s->oldest; k; k = k->newer) {
            size_t n = k->kind == KERNEL ? overlap(copy->dst, copy->bytes, k->dst, k->bytes, &start) : 0;
            if (n && !is_lost) is_lost = calloc(copy->bytes, 1);
            for (size_t i = start - copy->dst, end = i + n; n && i < end; i++)
                if (!is_lost[i]) {
                    is_lost[i] = 1;
                    k->before[copy->dst + i - k->dst] = content[i];
                }
        }
    if (!is_lost) memcpy(copy->dst, content, copy->bytes);
    for (size_t i = 0; is_lost && i < copy->bytes; i++)
        if (!is_lost[i]) copy->dst[i] = content[i];
    free(is_lost);
}

/* --- work --- */

static Work *append(Stream *stream, enum kind kind) {
    Work *work = calloc(1, sizeof *work);
    work->kind = kind;
    work->number = ++stream->issued;
    work->older = stream->newest;
    if (stream->newest) stream->newest->newer = work;
    else stream->oldest = work;
    stream->newest = work;
    if (!stream->waiting) stream->waiting = work;
    return work;
}

static void drop_oldest(Stream *stream) {
    Work *work = stream->oldest;
    stream->done = work->number;
    stream->oldest = work->newer;
    if (work->newer) work->newer->older = NULL;
    else stream->newest = NULL;
    free(work->before);
    free(work->content);
    free(work);
}

static void perform(Stream *stream, Work *work) {
    if (work->kind == FILL) memset(work->dst, work->value, work->bytes);
    if (work->kind == RECORD && work->event->stream == stream && work->event->number == work->number)
        work->event->ms = now_ms();
    if (work->kind == COPY) {
        if (!work->content) read_source(stream, work);
        write_unordered(stream, work, work->content);
    }
}

/* What has run is done, but for kernels: they end when they are waited for. */
static void retire(Stream *stream) {
    while (stream->oldest && stream->oldest != stream->waiting && stream->oldest->kind != KERNEL) drop_oldest(stream);
}

static void finish(Stream *stream, uint64_t number);

static void run_until(Stream *stream, uint64_t number) {
    for (Work *work; (work = stream->waiting) && work->number <= number; stream->waiting = work->newer) {
        if (work->kind == WAIT) finish(work->other, work->until);
        perform(stream, work);
    }
    retire(stream);
}

static void finish(Stream *stream, uint64_t number) {
    run_until(stream, number);
    while (stream->oldest && stream->oldest->number <= number) drop_oldest(stream);
    retire(stream);
}

/* Run what need not wait for anything that is not done; return whether there was any. */
static int run_free(Stream *stream) {
    Work *first = stream->waiting;
    for (Work *work; (work = stream->waiting); stream->waiting = work->newer) {
        if (work->kind == WAIT && work->other->done < work->until) break;
        perform(stream, work);
    }
    retire(stream);
    return stream->waiting != first;
}

static void let_go(void) {
    int progress = order == EARLY;
    while (progress) {
        progress = 0;
        for (Stream *s = streams; s; s = s->next_stream) progress |= run_free(s);
    }
    pthread_mutex_unlock(&lock);
}

static void maybe_run(Stream *stream) {
    if (order == RANDOM && is_early()) run_free(stream);
    let_go();
}

/* --- the interface --- */

Stream *stream_new(void) {
    Stream *stream = calloc(1, sizeof *stream);
    hold();
    stream->next_stream = streams;
    streams = stream;
    let_go();
    return stream;
}

__attribute__((constructor)) static void make_default(void) { default_stream = stream_new(); }

Stream *stream_of(void *handle) {
    return (uintptr_t)handle > 2 ? handle : default_stream;
}

Event *event_new(void) { return calloc(1, sizeof(Event)); }
double event_ms(const Event *event) { return event->ms; }

void enqueue_copy(Stream *stream, void *dst, const void *src, size_t bytes, int is_pageable, int is_ordered) {
    hold();
    Work *work = append(stream, COPY);
    work->dst = dst, work->src = src, work->bytes = bytes;
    if (!is_ordered) read_source(stream, work);
    if (is_pageable) finish(stream, stream->issued);
    maybe_run(stream);
}

void enqueue_fill(Stream *stream, void *dst, int value, size_t bytes) {
    hold();
    Work *work = append(stream, FILL);
    work->dst = dst, work->value = value, work->bytes = bytes;
    maybe_run(stream);
}

void enqueue_record(Stream *stream, Event *event) {
    hold();
    append(stream, RECORD)->event = event;
    *event = (Event){stream, stream->issued, 0, 0};
    maybe_run(stream);
}

void enqueue_wait(Stream *stream, const Event *event) {
    hold();
    if (event->stream && event->stream != stream) {
        Work *work = append(stream, WAIT);
        work->other = event->stream, work->until = event->number;
    }
    maybe_run(stream);
}

/* Return whether a thread waits for something. One that a busy machine keeps from running does not. */
static int is_asleep(pid_t thread) {
    char path[64], state = 'S';
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'S';
    if (file) fclose(file);
    return state == 'S';
}

/* Late: while another thread launches kernels, the device has other things to do. Returns with the lock. */
static void linger(const Stream *stream, uint64_t number) {
    hold();
    unsigned long latest = launches + rand_r(&seed) % MOST_LAUNCHES;
    int idle_looks = 0;
    while (order != EARLY && stream->done < number && launcher != gettid() && launches < latest && idle_looks < IDLE_LOOKS) {
        unsigned long before = launches;
        let_go();
        nanosleep(&(struct timespec){0, LOOK_MS * 1000000}, NULL);
        hold();
        if (launches == before && is_asleep(launcher)) break;
        idle_looks = launches == before ? idle_looks + 1 : 0;
    }
}

void stream_synchronize(Stream *stream) {
    hold();
    uint64_t number = stream->issued;
    let_go();
    linger(stream, number);
    finish(stream, number);
    let_go();
}

void event_synchronize(Event *event) {
    hold();
    Event then = *event;
    let_go();
    if (!then.stream) return;
    linger(then.stream, then.number);
    finish(then.stream, then.number);
    let_go();
}

void device_synchronize(void) {
    hold();
    for (Stream *s = streams; s; s = s->next_stream) finish(s, s->issued);
    let_go();
}

static int query(Stream *stream, uint64_t number, int *queries) {
    hold();
    if (stream && stream->done < number && ++*queries >= QUERIES) finish(stream, number);
    int is_done = !stream || stream->done >= number;
    if (is_done) *queries = 0;
    let_go();
    return is_done;
}

int stream_query(Stream *stream) { return query(stream, stream->issued, &stream->queries); }
int event_query(Event *event) { return query(event->stream, event->number, &event->queries); }
int event_is_done(const Event *event) { return !event->stream || event->stream->done >= event->number; }

static int touches(const Work *work, const char *at, size_t bytes) {
    const char *start;
    return work->kind == COPY && (overlap(at, bytes, work->dst, work->bytes, &start) || overlap(at, bytes, work->src, work->bytes, &start));
}

int is_in_use(const char *at, size_t bytes) {
    int found = 0;
    hold();
    for (Stream *s = streams; s; s = s->next_stream)
        for (Work *w = s->waiting; w; w = w->newer) found |= touches(w, at, bytes);
    pthread_mutex_unlock(&lock);
    return found;
}

void lose_memory(const char *at, size_t bytes) {
    hold();
    for (Stream *s = streams; s; s = s->next_stream)
        for (Work *w = s->waiting; w; w = w->newer)
            if (touches(w, at, bytes)) w->bytes = 0, break_device();
    pthread_mutex_unlock(&lock);
}

void break_device(void) { is_broken = 1; }
int device_error(void) { return is_broken ? ILLEGAL_ADDRESS : 0; }

API void fakegpu_launch(void *handle, const Range *ranges, size_t count) {
    Stream *stream = stream_of(handle);
    hold();
    launches++;
    launcher = gettid();
    run_until(stream, stream->issued);
    int is_pending = stream->oldest != NULL; /* a kernel that is late makes those behind it late */
    if (order == EARLY || (order == RANDOM && (is_pending || is_early())))
        for (size_t i = 0; i < count; i++) {
            Work *work = append(stream, KERNEL);
            work->dst = ranges[i].at, work->bytes = ranges[i].bytes;
            work->before = malloc(work->bytes);
            memcpy(work->before, work->dst, work->bytes);
            stream->waiting = NULL;
        }
    let_go();
}

API uint64_t fakegpu_issued(void *handle) { return stream_of(handle)->issued; }
API uint64_t fakegpu_done(void *handle) { return stream_of(handle)->done; }

API void fakegpu_order(const char *word) {
    hold();
    for (Stream *s = streams; s; s = s->next_stream) finish(s, s->issued);
    is_broken = 0;
    choose(word);
    let_go();
}
