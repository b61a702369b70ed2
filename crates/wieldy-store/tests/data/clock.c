// Shifts the wall clock of a program that loads it by the seconds of WIELDY_TEST_CLOCK=FIRST,LATER,FILE: by FIRST, and
// by LATER once FILE exists.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long first, later;
static char file[4096];

__attribute__((constructor)) static void begin(void) {
    const char *told = getenv("WIELDY_TEST_CLOCK");
    if (told)
        sscanf(told, "%ld,%ld,%4095s", &first, &later, file);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int status = syscall(SYS_clock_gettime, clock, time);
    if (status == 0 && clock == CLOCK_REALTIME)
        time->tv_sec += access(file, F_OK) == 0 ? later : first;
    return status;
}
