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
	isOver               bool
	cancel               context.CancelCauseFunc
}

func (c *Client) hold(granted *answer, sentAt time.Time, cancel context.CancelCauseFunc) *held {
	lease := time.Duration(granted.LeaseMs) * time.Millisecond
	of := &held{claim: granted.Claim, lease: lease, cancel: cancel}
	of.extended(sentAt)
	c.mutex.Lock()
	c.held[of.claim] = of
	c.mutex.Unlock()
	c.wake()
	return of
}

func (c *Client) letGo(of *held) {
	c.mutex.Lock()
	delete(c.held, of.claim)
	c.mutex.Unlock()
}

func (c *Client) wake() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
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
		if !now.Before(of.validUntil.Add(-of.lease / margins)) {
			of.cancel(ErrLeaseLost)
		}
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
