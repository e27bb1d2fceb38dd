package main

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"time"
)

// meter measures the time and this process's processor time from the last effect of the warm-up
// to the last effect.
type meter struct {
	warmUp, last int64
	effects      atomic.Int64
	started      time.Time
	cpu          time.Duration
	figures      chan string
}

func newMeter(warmUp, count int64) *meter {
	return &meter{warmUp: warmUp, last: warmUp + count, figures: make(chan string, 1)}
}

// effect is the effect of a message.
func (m *meter) effect() {
	switch m.effects.Add(1) {
	case m.warmUp:
		m.started = time.Now()
		m.cpu = cpuOfProcess()
	case m.last:
		seconds := time.Since(m.started).Seconds()
		cpu := cpuOfProcess() - m.cpu
		m.figures <- fmt.Sprintf(`{"seconds":%.6f,"cpu_micros":%d}`, seconds, cpu.Microseconds())
	}
}

func cpuOfProcess() time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		panic(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
