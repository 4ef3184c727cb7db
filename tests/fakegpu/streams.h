/* Streams and events of a device in host memory; the order of their work is an adversary's choice.

A stream is a list of work. Copies wait in it until something demands them. A kernel computes in the thread that
launches it, because that thread needs its results. To have it "late" all the same, the bytes that it overwrites are
kept: other streams see those until they wait for the kernel, or until the host has waited for it.

KVTIER_FAKE_ORDER chooses among the orders that CUDA allows:
  late      Copies run when an event behind them, their stream, or the device is waited for; kernels at once.
  early     Copies run as soon as the work they wait for has ended; kernels end when they are waited for.
  random:N  Each piece of work is late or early, by a generator with the seed N. */
#ifndef FAKEGPU_STREAMS_H
#define FAKEGPU_STREAMS_H
#include <stddef.h>
#include <stdint.h>

typedef struct Stream Stream;
typedef struct Event Event;
typedef struct { char *at; size_t bytes; } Range;

Stream *stream_new(void);
Stream *stream_of(void *handle); /* the default one for CUDA's special handles */
Event *event_new(void);
double event_ms(const Event *event);

/* Enqueue; return at once. A copy to or from pageable memory is waited for, as CUDA does. One that is not ordered reads
   its source at once, whatever the stream has to do before. */
void enqueue_copy(Stream *stream, void *dst, const void *src, size_t bytes, int is_pageable, int is_ordered);
void enqueue_fill(Stream *stream, void *dst, int value, size_t bytes);
void enqueue_record(Stream *stream, Event *event);
void enqueue_wait(Stream *stream, const Event *event);

/* Wait. A query makes no work run at first, but the third one of the same event does. */
void stream_synchronize(Stream *stream);
void event_synchronize(Event *event);
void device_synchronize(void);
int stream_query(Stream *stream);
int event_query(Event *event);
int event_is_done(const Event *event);

/* Return whether a copy is pending that touches this memory. */
int is_in_use(const char *at, size_t bytes);

/* This memory goes away: pending copies that touch it are not made, and break the device, as on a real one. */
void lose_memory(const char *at, size_t bytes);

/* Note an illegal access. From then on device_error returns CUDA's number for it, and not 0. */
void break_device(void);
int device_error(void);

/* Called before a kernel computes in the calling thread: its stream's earlier work runs now. The ranges are what the
   kernel overwrites, as far as other streams may look at it. */
void fakegpu_launch(void *stream, const Range *ranges, size_t count);

/* Finish all work, and repair the device; then use this order instead of the one in the environment. */
void fakegpu_order(const char *word);

/* Return how many pieces of work a stream was given, and how many are done. */
uint64_t fakegpu_issued(void *stream);
uint64_t fakegpu_done(void *stream);
#endif
