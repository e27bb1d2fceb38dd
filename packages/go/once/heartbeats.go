package once

import (
	"context"
	"net/http"
	"time"
)

const (
	extends    = 3 // a claim is extended after this part of its lease,
	margins    = 6 // and not used any more for this part at its end
	mostClaims = 1000
)

type held struct {
	claim                string
	lease                time.Duration
	validUntil, extendAt time.Time
	isOver, isLost       bool
	cancel               context.CancelCauseFunc
}

// hold returns false when the client is closed: nothing would extend the claim.
func (c *Client) hold(granted *answer, sentAt time.Time, cancel context.CancelCauseFunc) (*held, bool) {
	lease := time.Duration(granted.LeaseMs) * time.Millisecond
	of := &held{claim: granted.Claim, lease: lease, cancel: cancel}
	of.extended(sentAt)
	c.mutex.Lock()
	isOver := c.isOver
	if !isOver {
		c.held[of.claim] = of
	}
	c.mutex.Unlock()
	c.wake()
	return of, !isOver
}

func (c *Client) letGo(of *held) {
	c.mutex.Lock()
	delete(c.held, of.claim)
	c.mutex.Unlock()
}

func (c *Client) wake() {
	for _, changed := range []chan struct{}{c.changed, c.watched} {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

// stop ends the heartbeats, and tells what still runs that nothing extends its claim any more.
func (c *Client) stop() {
	c.mutex.Lock()
	c.isOver = true
	for _, of := range c.held {
		of.cancel(ErrLeaseLost)
	}
	c.mutex.Unlock()
	close(c.closed)
}

// watch tells of leases that are nearly over, also while a heartbeat has no answer.
func (c *Client) watch() {
	for {
		select {
		case <-c.closed:
			return
		case <-c.watched:
		case <-time.After(c.lose(time.Now())):
		}
	}
}

// lose cancels what is not safe any more, and returns how long the rest is.
func (c *Client) lose(now time.Time) time.Duration {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	next := time.Hour
	for _, of := range c.held {
		left := of.validUntil.Add(-of.lease / margins).Sub(now)
		switch {
		case of.isLost:
		case left <= 0:
			of.isLost = true
			of.cancel(ErrLeaseLost)
		default:
			next = min(next, left)
		}
	}
	return next
}

func (h *held) extended(sentAt time.Time) {
	h.validUntil, h.extendAt = sentAt.Add(h.lease), sentAt.Add(h.lease/extends)
}

// heartbeats extends all claims. Goroutines are preempted, so a function that computes does not hold it up.
func (c *Client) heartbeats() {
	for {
		due, shortest, next := c.due(time.Now())
		if len(due) == 0 {
			select {
			case <-c.closed:
				return
			case <-c.changed:
			case <-time.After(next):
			}
			continue
		}
		claims := make([]string, len(due))
		for at, of := range due {
			claims[at] = of.claim
		}
		sentAt := time.Now()
		limit := max(50*time.Millisecond, shortest/extends)
		status, got, _ := c.post(context.Background(), "/v1/claims/extend", map[string]any{"claims": claims}, limit)
		c.mutex.Lock()
		for at, of := range due {
			state := "unknown"
			if status == http.StatusOK && at < len(got.Claims) {
				state = got.Claims[at].State
			}
			switch state {
			case "extended":
				of.extended(sentAt)
			case "unknown":
				of.extendAt = time.Now().Add(of.lease / 20)
			default:
				of.isOver = true
				of.cancel(ErrLeaseLost)
			}
		}
		c.mutex.Unlock()
	}
}

// due returns the claims to extend, their shortest lease, and how long there are none.
func (c *Client) due(now time.Time) (due []*held, shortest, next time.Duration) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	next, shortest = time.Hour, time.Hour
	for _, of := range c.held {
		switch {
		case of.isOver:
		case now.Before(of.extendAt):
			next = min(next, of.extendAt.Sub(now))
		case len(due) < mostClaims:
			due, shortest = append(due, of), min(shortest, of.lease)
		}
	}
	return due, shortest, next
}
